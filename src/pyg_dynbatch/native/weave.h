/* Kernels of weave networks: what each pair reads of its atoms, and Gaussian histograms, float32.

   A part of kernels.c. Every sum has one order, whatever the number of threads. */

/* max(u_i + v_j, 0) + max(u_j + v_i, 0) of every pair, from rows of atoms with u and then v. */
static void order_relu(const float *parts, int64_t width, const int32_t *first,
                       const int32_t *second, int64_t pairs, float *out, int threads)
{
    PARALLEL_FOR(threads > 1 && pairs * width > ENOUGH)
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

/* out = rows * weight, with rows `apart` and a [columns, padded] weight of whole vectors. */
INLINE void padded_product(const float *rows, int64_t count, int64_t apart, int64_t columns,
                           const float *weight, int64_t padded, float *out)
{
    for (int64_t k = 0, left; (left = (padded - k) / LANES) > 0; k += left < 4 ? LANES : 4 * LANES)
        left < 4
            ? stretches_of(1, rows, count, apart, columns, weight + k, padded, padded, out + k)
            : stretches_of(4, rows, count, apart, columns, weight + k, padded, padded, out + k);
}

/* max(row + more, 0) in place. */
INLINE void add_and_cut(rows_t row, given_t more, int64_t width)
{
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        const float total = row[k] + more[k];
        row[k] = total < 0.0f ? 0.0f : total;
    }
}

/* The sums over the pairs from `begin` to `end`, a few pairs at a time. */
static void sum_updated_pairs(const struct pair_layers *p, int64_t begin, int64_t end)
{
    enum { FEW = 32 };
    const int32_t *second = p->begins + p->pairs;
    float between[FEW * p->width], rows[FEW * p->inner], sums[FEW * p->padded];
    for (int64_t pair = begin; pair < end; pair += FEW) {
        const int64_t count = end - pair < FEW ? end - pair : FEW;
        order_relu(p->parts, p->width, p->begins + pair, second + pair, count, between, 1);
        padded_product(between, count, p->width, p->width, p->weight, p->inner, rows);
        for (int64_t k = 0; k < count; k++)
            add_and_cut(rows + k * p->inner,
                        p->own + (p->code ? p->code[pair + k] : pair + k) * p->inner, p->inner);
        padded_product(rows, count, p->inner, p->middle, p->next, p->padded, sums);
        for (int64_t k = 0; k < count; k++) {
            const int64_t first = p->begins[pair + k], other = second[pair + k];
            add_and_cut(sums + k * p->padded, p->bias, p->padded);
            add(p->padded, p->sums + first * p->padded, sums + k * p->padded);
            if (first != other)
                add(p->padded, p->sums + other * p->padded, sums + k * p->padded);
        }
    }
}

/* Every thread has molecules of its own, so that no two write to one atom. */
static void pair_layers(const struct pair_layers *p)
{
    const int threads = (int)p->threads;
    PARALLEL_FOR(threads > 1)
    for (int64_t thread = 0; thread < p->threads; thread++)
        sum_updated_pairs(p, p->starts[thread], p->starts[thread + 1]);
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
        FOR_BINS(bin)
            total[bin * width + k] += member[bin] / sum;
    }
}

/* Adds the memberships of every element to the histograms of its set, [set, bin, column]. */
static void histogram(const float *x, const int64_t *set, int64_t rows, int64_t width,
                      const float *mean, const float *sharpness, float *out, int threads)
{
    /* Every thread has columns of its own, so that no two write to one place. */
    PARALLEL_FOR(threads > 1 && rows * width > ENOUGH / BINS)
    for (int64_t thread = 0; thread < threads; thread++) {
        const int64_t start = width * thread / threads, end = width * (thread + 1) / threads;
        for (int64_t row = 0; row < rows; row++)
            add_memberships(x + row * width + start, end - start, width, mean, sharpness,
                            out + set[row] * BINS * width + start);
    }
}
