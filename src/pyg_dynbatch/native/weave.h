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
#define STRETCH 16 /* columns that are computed together */

typedef float bins_t[BINS][STRETCH];

/* Distances to the bins in their widths, and the softmax of their negative squares. */
INLINE void memberships(given_t x, int64_t count, given_t mean, given_t sharpness, bins_t distance,
                        bins_t member)
{
    float nearest[STRETCH], sum[STRETCH] = {0};
    for (int bin = 0; bin < BINS; bin++) {
        #pragma omp simd
        for (int64_t k = 0; k < count; k++) {
            distance[bin][k] = (x[k] - mean[bin]) * sharpness[bin];
            const float squared = distance[bin][k] * distance[bin][k];
            nearest[k] = bin && nearest[k] < squared ? nearest[k] : squared;
        }
    }
    for (int bin = 0; bin < BINS; bin++) {
        #pragma omp simd
        for (int64_t k = 0; k < count; k++) {
            const float power = nearest[k] - distance[bin][k] * distance[bin][k];
            member[bin][k] = power < -87.0f ? 0.0f : exponential(power);
            sum[k] += member[bin][k];
        }
    }
    for (int bin = 0; bin < BINS; bin++) {
        #pragma omp simd
        for (int64_t k = 0; k < count; k++)
            member[bin][k] /= sum[k];
    }
}

INLINE void add_memberships(given_t x, int64_t count, int64_t width, given_t mean,
                            given_t sharpness, float *total)
{
    bins_t distance, member;
    memberships(x, count, mean, sharpness, distance, member);
    for (int bin = 0; bin < BINS; bin++)
        add(count, total + bin * width, member[bin]);
}

/* Adds the memberships of every element to the histograms of its set, [set, bin, column]. */
static void histogram(const float *x, const int64_t *set, int64_t rows, int64_t width,
                      const float *mean, const float *sharpness, float *out, int threads)
{
    /* Every thread has columns of its own, so that no two write to one place. */
    PARALLEL_FOR(threads > 1 && rows *width > ENOUGH / BINS)
    for (int64_t start = 0; start < width; start += STRETCH)
        for (int64_t row = 0; row < rows; row++) {
            const float *from = x + row * width + start;
            float *total = out + set[row] * BINS * width + start;
            if (start + STRETCH <= width) /* a constant is faster */
                add_memberships(from, STRETCH, width, mean, sharpness, total);
            else
                add_memberships(from, width - start, width, mean, sharpness, total);
        }
}
