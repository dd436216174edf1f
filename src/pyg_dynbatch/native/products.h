/* Products of a few rows with a matrix as it is, float32: panels.h has those for many rows.

   A BLAS is made for many rows; a level near the roots of a batch has few.
   Sums stay in registers: some rows times some rows of the matrix, or some stretches of one.
   A part of kernels.c. */

/* Lanes of a vector, and how many rows times rows or stretches of the matrix fit the registers. */
#ifdef __AVX512F__
#define LANES 16
#define ROWS 4
#define COLUMNS 6
#else
#define LANES 8
#define ROWS 3
#define COLUMNS 4
#endif
#define UNROLL _Pragma("GCC unroll 16")
/* Numbers of a matrix from which more threads than one are worth waking. */
#define LARGE 65536

/* Aligned like floats: rows begin anywhere. */
typedef float lanes_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t bits_t __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float eight_t __attribute__((vector_size(32)));
typedef int32_t order_t __attribute__((vector_size(32)));
#ifdef __clang__
#define SHUFFLE(one, two, ...) __builtin_shufflevector(one, two, __VA_ARGS__)
#else
#define SHUFFLE(one, two, ...) __builtin_shuffle(one, two, (order_t){__VA_ARGS__})
#endif
typedef float four_t __attribute__((vector_size(16), aligned(4), may_alias));

INLINE lanes_t lanes(const float *from)
{
    return *(const lanes_t *)from;
}

static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Not by a product: infinity times 0 is not a number. */
INLINE lanes_t without_first(lanes_t all, int64_t count)
{
    return (lanes_t)((bits_t)all & (*(const bits_t *)numbers >= (int32_t)count));
}

INLINE eight_t folded(lanes_t sum)
{
    eight_t half[LANES / 8];
    memcpy(half, &sum, sizeof sum);
#if LANES == 16
    half[0] += half[1];
#endif
    return half[0];
}

/* Sums of neighbours' halves, alternating between two vectors. */
#define PAIRED(one, two)                                                                           \
    (SHUFFLE(one, two, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(one, two, 2, 10, 3, 11, 6, 14, 7, 15))

/* The sums of four vectors. */
INLINE four_t totals(lanes_t a, lanes_t b, lanes_t c, lanes_t d)
{
    eight_t one = folded(a), two = folded(b), three = folded(c), four = folded(d);
    one = PAIRED(one, two);
    three = PAIRED(three, four);
    one = SHUFFLE(one, three, 0, 1, 8, 9, 4, 5, 12, 13) +
          SHUFFLE(one, three, 2, 3, 10, 11, 6, 7, 14, 15);
    four_t half[2];
    memcpy(half, &one, sizeof one);
    return half[0] + half[1];
}

typedef lanes_t sums_t[ROWS][COLUMNS + 2]; /* The last two are zeros, for `totals`. */

/* Adds the products of the lanes from k on, of which the first `early` count already. */
INLINE void add_products(int rows_count, int count, const float *rows, int64_t inner,
                         const float *weight, int64_t k, int64_t early, sums_t sums)
{
    lanes_t given[ROWS] = {0};
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
        UNROLL for (int c = 0; c < count; c += 4) {
            const four_t found = totals(sums[m][c], sums[m][c + 1], sums[m][c + 2], sums[m][c + 3]);
            for (int each = 0; each < 4 && c + each < count; each++)
                out[m * columns + c + each] = found[each] + bias[c + each];
        }
    }
}

/* Calls `function` for some rows at once, with their number as a constant. */
#define FOR_ROWS(function, rows_count, m, ...)                                                     \
    for (int64_t m = 0, left; (left = (rows_count) - m) > 0; m += ROWS)                            \
    left >= ROWS ? function(ROWS, __VA_ARGS__)                                                     \
    : left == 3  ? function(3, __VA_ARGS__)                                                        \
    : left == 2  ? function(2, __VA_ARGS__)                                                        \
                 : function(1, __VA_ARGS__)

/* Some columns of all rows: what is read of the matrix stays in the cache. */
INLINE void columns_of(int count, const float *rows, int64_t rows_count, int64_t inner,
                       const float *weight, const float *bias, float *out, int64_t columns)
{
    FOR_ROWS(dot_products, rows_count, m, count, rows + m * inner, inner, weight, bias,
             out + m * columns, columns);
}

/* For rows shorter than a vector: out[m][c] = sum of rows[m][k] * weight[c * across + k * along]
   over k, and bias[c] if there is one. */
static void short_product(const float *rows, int64_t count, int64_t inner, const float *weight,
                          int64_t across, int64_t along, const float *bias, int64_t columns,
                          float *out)
{
    for (int64_t m = 0; m < count; m++)
        for (int64_t c = 0; c < columns; c++) {
            float sum = bias ? bias[c] : 0.0f;
            for (int64_t k = 0; k < inner; k++)
                sum += rows[m * inner + k] * weight[c * across + k * along];
            out[m * columns + c] = sum;
        }
}

/* out = rows * weight^T + bias, with [count, inner] rows and a [columns, inner] weight. */
static void narrow_product(const float *rows, int64_t count, int64_t inner, const float *weight,
                           const float *bias, int64_t columns, float *out, int threads)
{
    if (inner < LANES) {
        short_product(rows, count, inner, weight, inner, 1, bias, columns, out);
        return;
    }
    const int64_t tiles = columns / COLUMNS;
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t c = tile * COLUMNS;
        columns_of(COLUMNS, rows, count, inner, weight + c * inner, bias + c, out + c, columns);
    }
    for (int64_t c = tiles * COLUMNS; c < columns; c++)
        columns_of(1, rows, count, inner, weight + c * inner, bias + c, out + c, columns);
}

/* out[m][k] = sum of grads[m][c] * weight[c][k] over c, for some rows and stretches of k; rows of
   `grads` are `apart`. */
INLINE void sums_of_rows(int rows_count, int count, const float *grads, int64_t apart,
                         int64_t columns, const float *weight, int64_t stride, int64_t inner,
                         float *out)
{
    sums_t sums = {0};
    lanes_t of_weight[COLUMNS];
    for (int64_t c = 0; c < columns; c++) {
        UNROLL for (int part = 0; part < count; part++)
            of_weight[part] = lanes(weight + c * stride + part * LANES);
        UNROLL for (int m = 0; m < rows_count; m++) {
            const float grad = grads[m * apart + c];
            UNROLL for (int part = 0; part < count; part++)
                sums[m][part] += grad * of_weight[part];
        }
    }
    UNROLL for (int m = 0; m < rows_count; m++) {
        UNROLL for (int part = 0; part < count; part++)
            *(lanes_t *)(out + m * inner + part * LANES) = sums[m][part];
    }
}

INLINE void stretches_of(int count, const float *grads, int64_t rows_count, int64_t apart,
                         int64_t columns, const float *weight, int64_t stride, int64_t inner,
                         float *out)
{
    FOR_ROWS(sums_of_rows, rows_count, m, count, grads + m * apart, apart, columns, weight, stride,
             inner, out + m * inner);
}

/* out = grads * weight, with [count, columns] grads and a [columns, inner] weight. */
static void narrow_product_back(const float *grads, int64_t count, int64_t columns,
                                const float *weight, int64_t inner, float *out, int threads)
{
    if (inner < LANES) {
        short_product(grads, count, columns, weight, 1, inner, 0, inner, out);
        return;
    }
    const int64_t tiles = inner / (COLUMNS * LANES);
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t k = tile * COLUMNS * LANES;
        stretches_of(COLUMNS, grads, count, columns, columns, weight + k, inner, inner, out + k);
    }
    for (int64_t k = tiles * COLUMNS * LANES; k < inner; k += LANES) {
        /* The last lanes begin earlier, and compute some sums twice. */
        const int64_t start = k + LANES > inner ? inner - LANES : k;
        stretches_of(1, grads, count, columns, columns, weight + start, inner, inner, out + start);
    }
}
