/* Kernels of weave networks: what each pair reads of its atoms, and Gaussian histograms, float32.

   A part of kernels.c. Every sum has one order, whatever the number of threads. */

/* max(u_i + v_j, 0) + max(u_j + v_i, 0) of every pair, from rows of atoms with u and then v. */
static void order_relu(const float *parts, int64_t width, const int32_t *first,
                       const int32_t *second, int64_t pairs, float *out, int threads)
{
    PARALLEL_FOR(threads > 1 && pairs *width > ENOUGH)
    for (int64_t pair = 0; pair < pairs; pair++) {
        given_t u = parts + 2 * width * first[pair], other_u = parts + 2 * width * second[pair];
        given_t v = u + width, other_v = other_u + width;
        rows_t to = out + pair * width;
        #pragma omp simd
        for (int64_t k = 0; k < width; k++) {
            const float one = u[k] + other_v[k], two = other_u[k] + v[k];
            to[k] = (one < 0.0f ? 0.0f : one) + (two < 0.0f ? 0.0f : two);
        }
    }
}

#define BINS 11
#define FOR_BINS(bin) _Pragma("GCC unroll 11") for (int bin = 0; bin < BINS; bin++)

/* Adds the memberships of a row: the softmax of negative squares of distances in widths. */
INLINE void add_memberships(given_t x, int64_t count, int64_t width, given_t mean,
                            given_t sharpness, rows_t total)
{
    #pragma omp simd
    for (int64_t k = 0; k < count; k++) {
        float member[BINS], nearest = 0.0f, sum = 0.0f;
        FOR_BINS(bin) {
            const float distance = (x[k] - mean[bin]) * sharpness[bin];
            member[bin] = distance * distance;
            nearest = bin && nearest < member[bin] ? nearest : member[bin];
        }
        FOR_BINS(bin) {
            const float power = nearest - member[bin];
            member[bin] = power < -87.0f ? 0.0f : exponential(power);
            sum += member[bin];
        }
        FOR_BINS(bin) total[bin * width + k] += member[bin] / sum;
    }
}

/* Adds the memberships of every element to the histograms of its set, [set, bin, column]. */
static void histogram(const float *x, const int64_t *set, int64_t rows, int64_t width,
                      const float *mean, const float *sharpness, float *out, int threads)
{
    /* Every thread has columns of its own, so that no two write to one place. */
    PARALLEL_FOR(threads > 1 && rows *width > ENOUGH / BINS)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t start = width * part / threads, end = width * (part + 1) / threads;
        for (int64_t row = 0; row < rows; row++)
            add_memberships(x + row * width + start, end - start, width, mean, sharpness,
                            out + set[row] * BINS * width + start);
    }
}
