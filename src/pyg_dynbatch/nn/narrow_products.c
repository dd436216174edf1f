/* Products of one to seven rows with a matrix, float32.

   A BLAS is made for more; a level near the roots of a batch has no more.
   Sums stay in registers: three rows times four rows of the matrix, or four stretches of one. */

#include <stdint.h>
#include <string.h>

#define NARROW 7 /* Rows at most; with more a BLAS is faster. */
#define TOGETHER 3 /* Rows whose sums fit the registers. */
#define LANES 8
#define TILE 4
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")
/* Columns times rows of the matrix from which more threads than one are worth waking. */
#define LARGE 65536

/* Whether the functions below can multiply `count` rows of so many columns. */
#define IS_NARROW(count, inner) ((count) <= NARROW && (inner) >= LANES)

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

typedef int32_t bits_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Bits of the lanes that count when the first ones do not: read from the end of the zeros on. */
static const int32_t counting[2 * LANES] = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};

/* Not by a product: infinity times 0 is no number. */
INLINE lanes_t without_first(lanes_t all, int64_t count)
{
    return (lanes_t)((bits_t)all & *(const bits_t *)(counting + LANES - count));
}

typedef lanes_t sums_t[TOGETHER][TILE];

/* Adds the products of the lanes from k on, of which the first `early` count already. */
INLINE void add_products(int rows_count, int count, const float *rows, int64_t inner,
                         const float *weight, int64_t k, int64_t early, sums_t sums)
{
    lanes_t given[TOGETHER] = {0};
    UNROLL for (int m = 0; m < rows_count; m++) {
        given[m] = lanes(rows + m * inner + k);
        if (early)
            given[m] = without_first(given[m], early);
    }
    UNROLL for (int c = 0; c < count; c++) {
        lanes_t of_weight = lanes(weight + c * inner + k);
        if (early)
            of_weight = without_first(of_weight, early);
        UNROLL for (int m = 0; m < rows_count; m++)
            sums[m][c] += given[m] * of_weight;
    }
}

/* out[m][c] = rows[m] . weight[c] + bias[c] for some rows and `count` columns. */
INLINE void dot_products(int rows_count, int count, const float *rows, int64_t inner,
                         const float *weight, const float *bias, float *out, int64_t columns)
{
    sums_t sums = {0};
    int64_t k = 0;
    for (; k + LANES <= inner; k += LANES)
        add_products(rows_count, count, rows, inner, weight, k, 0, sums);
    const int64_t last = inner - LANES; /* The last lanes begin earlier. */
    if (k < inner)
        add_products(rows_count, count, rows, inner, weight, last, k - last, sums);
    UNROLL for (int m = 0; m < rows_count; m++) {
        UNROLL for (int c = 0; c < count; c++)
            out[m * columns + c] = total(sums[m][c]) + bias[c];
    }
}

/* Some columns of all rows: what is read of the matrix stays in the cache. */
INLINE void columns_of(int count, const float *rows, int64_t rows_count, int64_t inner,
                       const float *weight, const float *bias, float *out, int64_t columns)
{
    int64_t m = 0;
    for (; m + TOGETHER <= rows_count; m += TOGETHER)
        dot_products(TOGETHER, count, rows + m * inner, inner, weight, bias, out + m * columns,
                     columns);
    if (rows_count - m == 2)
        dot_products(2, count, rows + m * inner, inner, weight, bias, out + m * columns, columns);
    else if (rows_count - m == 1)
        dot_products(1, count, rows + m * inner, inner, weight, bias, out + m * columns, columns);
}

/* out = rows * weight^T + bias, with [count, inner] rows and a [columns, inner] weight. */
static void narrow_product(const float *rows, int64_t count, int64_t inner, const float *weight,
                           const float *bias, int64_t columns, float *out, int threads)
{
    const int64_t tiles = columns / TILE;
    #pragma omp parallel for num_threads(threads) if (threads > 1 && columns * inner > LARGE)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t c = tile * TILE;
        columns_of(TILE, rows, count, inner, weight + c * inner, bias + c, out + c, columns);
    }
    for (int64_t c = tiles * TILE; c < columns; c++)
        columns_of(1, rows, count, inner, weight + c * inner, bias + c, out + c, columns);
}

/* out[m][k] = sum of grads[m][c] * weight[c][k] over c, for some rows and stretches of k. */
INLINE void sums_of_rows(int rows_count, int count, const float *grads, int64_t columns,
                         const float *weight, int64_t inner, float *out)
{
    lanes_t sums[TOGETHER][TILE] = {0}, of_weight[TILE];
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

INLINE void stretches_of(int count, const float *grads, int64_t rows_count, int64_t columns,
                         const float *weight, int64_t inner, float *out)
{
    int64_t m = 0;
    for (; m + TOGETHER <= rows_count; m += TOGETHER)
        sums_of_rows(TOGETHER, count, grads + m * columns, columns, weight, inner,
                     out + m * inner);
    if (rows_count - m == 2)
        sums_of_rows(2, count, grads + m * columns, columns, weight, inner, out + m * inner);
    else if (rows_count - m == 1)
        sums_of_rows(1, count, grads + m * columns, columns, weight, inner, out + m * inner);
}

/* out = grads * weight, with [count, columns] grads and a [columns, inner] weight. */
static void narrow_product_back(const float *grads, int64_t count, int64_t columns,
                                const float *weight, int64_t inner, float *out, int threads)
{
    const int64_t tiles = inner / (TILE * LANES);
    #pragma omp parallel for num_threads(threads) if (threads > 1 && columns * inner > LARGE)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t k = tile * TILE * LANES;
        stretches_of(TILE, grads, count, columns, weight + k, inner, out + k);
    }
    for (int64_t k = tiles * TILE * LANES; k < inner; k += LANES) {
        /* The last lanes begin earlier, and compute some sums twice. */
        const int64_t start = k + LANES > inner ? inner - LANES : k;
        stretches_of(1, grads, count, columns, weight + start, inner, out + start);
    }
}
