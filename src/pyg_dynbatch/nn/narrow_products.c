/* Products of one to three rows with a matrix, float32.

   A BLAS reads the matrix once for each row here; a level near the roots of a batch has no more.
   Sums stay in registers: rows times four rows of the matrix, or four stretches of one. */

#include <stdint.h>
#include <string.h>

#define NARROW 3 /* Rows at most; with more a BLAS is faster. */
#define LANES 8
#define TILE 4
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")
/* Columns times rows of the matrix from which more threads than one are worth waking. */
#define LARGE 65536

/* Aligned like floats: rows begin anywhere. */
typedef float lanes_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE lanes_t lanes(const float *from)
{
    return *(const lanes_t *)from;
}

INLINE float total(lanes_t sum)
{
    float s[LANES];
    memcpy(s, &sum, sizeof s);
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* out[m][c] = rows[m] . weight[c] + bias[c] for some rows and `count` columns. */
INLINE void dot_products(int rows_count, int count, const float *rows, int64_t inner,
                         const float *weight, const float *bias, float *out, int64_t columns)
{
    lanes_t sums[NARROW][TILE] = {0}, given[NARROW];
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES) {
        UNROLL for (int m = 0; m < rows_count; m++)
            given[m] = lanes(rows + m * inner + k);
        UNROLL for (int c = 0; c < count; c++) {
            const lanes_t of_weight = lanes(weight + c * inner + k);
            UNROLL for (int m = 0; m < rows_count; m++)
                sums[m][c] += given[m] * of_weight;
        }
    }
    UNROLL for (int m = 0; m < rows_count; m++) {
        UNROLL for (int c = 0; c < count; c++) {
            float sum = total(sums[m][c]);
            for (int64_t rest = k; rest < inner; rest++)
                sum += rows[m * inner + rest] * weight[c * inner + rest];
            out[m * columns + c] = sum + bias[c];
        }
    }
}

INLINE void rows_times(int rows_count, const float *rows, int64_t inner, const float *weight,
                       const float *bias, int64_t columns, float *out, int threads)
{
    const int64_t tiles = columns / TILE;
    #pragma omp parallel for num_threads(threads) if (threads > 1 && columns * inner > LARGE)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t c = tile * TILE;
        dot_products(rows_count, TILE, rows, inner, weight + c * inner, bias + c, out + c, columns);
    }
    for (int64_t c = tiles * TILE; c < columns; c++)
        dot_products(rows_count, 1, rows, inner, weight + c * inner, bias + c, out + c, columns);
}

/* out = rows * weight^T + bias, with [count, inner] rows and a [columns, inner] weight. */
static void narrow_product(const float *rows, int64_t count, int64_t inner, const float *weight,
                           const float *bias, int64_t columns, float *out, int threads)
{
    if (count == 1)
        rows_times(1, rows, inner, weight, bias, columns, out, threads);
    else if (count == 2)
        rows_times(2, rows, inner, weight, bias, columns, out, threads);
    else if (count == 3)
        rows_times(3, rows, inner, weight, bias, columns, out, threads);
}

/* out[m][k] = sum of grads[m][c] * weight[c][k] over c, for some rows and stretches of k. */
INLINE void sums_of_rows(int rows_count, int count, const float *grads, int64_t columns,
                         const float *weight, int64_t inner, float *out)
{
    lanes_t sums[NARROW][TILE] = {0}, of_weight[TILE];
    for (int64_t c = 0; c < columns; c++) {
        UNROLL for (int part = 0; part < count; part++)
            of_weight[part] = lanes(weight + c * inner + part * LANES);
        UNROLL for (int m = 0; m < rows_count; m++) {
            const float grad = grads[m * columns + c];
            UNROLL for (int part = 0; part < count; part++)
                sums[m][part] += grad * of_weight[part];
        }
    }
    UNROLL for (int m = 0; m < rows_count; m++) {
        UNROLL for (int part = 0; part < count; part++)
            *(lanes_t *)(out + m * inner + part * LANES) = sums[m][part];
    }
}

INLINE void grads_times(int rows_count, const float *grads, int64_t columns, const float *weight,
                        int64_t inner, float *out, int threads)
{
    const int64_t tiles = inner / (TILE * LANES);
    #pragma omp parallel for num_threads(threads) if (threads > 1 && columns * inner > LARGE)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t k = tile * TILE * LANES;
        sums_of_rows(rows_count, TILE, grads, columns, weight + k, inner, out + k);
    }
    int64_t k = tiles * TILE * LANES;
    for (; k + LANES <= inner; k += LANES)
        sums_of_rows(rows_count, 1, grads, columns, weight + k, inner, out + k);
    for (; k < inner; k++) {
        for (int m = 0; m < rows_count; m++) {
            float sum = 0.0f;
            for (int64_t c = 0; c < columns; c++)
                sum += grads[m * columns + c] * weight[c * inner + k];
            out[m * inner + k] = sum;
        }
    }
}

/* out = grads * weight, with [count, columns] grads and a [columns, inner] weight. */
static void narrow_product_back(const float *grads, int64_t count, int64_t columns,
                                const float *weight, int64_t inner, float *out, int threads)
{
    if (count == 1)
        grads_times(1, grads, columns, weight, inner, out, threads);
    else if (count == 2)
        grads_times(2, grads, columns, weight, inner, out, threads);
    else if (count == 3)
        grads_times(3, grads, columns, weight, inner, out, threads);
}
