/* Products of many rows with a matrix, float32. A part of kernels.c.

   pack_transpose or pack_matrix, once for all rows -> packed_product, for each block of rows

   Here m numbers the rows of a product, c its columns, and k the numbers that a sum is over:
   out[m][c] = sum of rows[m][k] * matrix[k][c] + bias[c]. There are `inner` of the last.

   A packed matrix is a list of panels. A panel holds all weights of some columns, as many as two
   vectors have, or one vector if no more are left. It holds them in the order in which a product
   reads them, with zeros where there are no more columns:

       matrix[0][first], .., matrix[0][first + width - 1],
       matrix[1][first], .., matrix[1][first + width - 1], .. up to matrix[inner - 1]

   A product of a panel is computed for a few rows at once, a tile, whose sums stay in registers.
   Packing takes as long as the product of some 50 rows. */

/* Most rows of a tile: with their sums, a row of the panel and one number fill the registers. */
#ifdef __AVX512F__
#define TILE 14
#elif defined(__SSE2__) && !defined(__AVX2__)
#define TILE 2
#else
#define TILE 6
#endif
/* Columns of a panel, but perhaps of the last. */
#define PANEL (2 * LANES)

/* Columns of a panel where `left` columns of the matrix are left. */
INLINE int64_t panel_width(int64_t left)
{
    return left > LANES ? PANEL : LANES;
}

INLINE int64_t at_most(int64_t limit, int64_t count)
{
    return count < limit ? count : limit;
}

/* Packing. Eight rows of eight numbers are transposed in registers. */

/* Replaces two vectors by two choices of their numbers; those of `two` are counted from 8. */
#define EXCHANGE(one, two, for_one, for_two)                                                       \
    {                                                                                              \
        const eight_t before = one;                                                                \
        one = SHUFFLE(before, two, UNWRAPPED for_one);                                             \
        two = SHUFFLE(before, two, UNWRAPPED for_two);                                             \
    }
#define UNWRAPPED(...) __VA_ARGS__

/* They exchange every second number, pair of numbers, or half. */
#define EXCHANGE_NUMBERS(one, two)                                                                 \
    EXCHANGE(one, two, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15))
#define EXCHANGE_PAIRS(one, two)                                                                   \
    EXCHANGE(one, two, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
#define EXCHANGE_HALVES(one, two)                                                                  \
    EXCHANGE(one, two, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))

/* to[k][c] = from[c][k] for eight rows and columns, by exchanges within squares of 2, 4 and 8. */
INLINE void transpose_eight(const float *from, int64_t from_stride, float *to, int64_t to_stride)
{
    eight_t row[8];
    UNROLL for (int c = 0; c < 8; c++)
        memcpy(&row[c], from + c * from_stride, sizeof row[c]);
    UNROLL for (int c = 0; c < 8; c += 2)
        EXCHANGE_NUMBERS(row[c], row[c + 1])
    UNROLL for (int square = 0; square < 8; square += 4) {
        EXCHANGE_PAIRS(row[square], row[square + 2])
        EXCHANGE_PAIRS(row[square + 1], row[square + 3])
    }
    UNROLL for (int c = 0; c < 4; c++)
        EXCHANGE_HALVES(row[c], row[c + 4])
    UNROLL for (int k = 0; k < 8; k++)
        memcpy(to + k * to_stride, &row[k], sizeof row[k]);
}

/* The same where there are fewer c or k, with zeros for the c that are missing. */
static void transpose_some(const float *from, int64_t count_c, int64_t count_k, int64_t from_stride,
                           float *to, int64_t to_stride)
{
    for (int64_t k = 0; k < count_k; k++)
        for (int64_t c = 0; c < 8; c++)
            to[k * to_stride + c] = c < count_c ? from[c * from_stride + k] : 0.0f;
}

/* Packs the transpose of a [columns, inner] weight, for products rows * weight^T. */
static void pack_transpose(const float *weight, int64_t columns, int64_t inner, float *panels,
                           int threads)
{
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t first = 0; first < columns; first += PANEL) {
        const int64_t width = panel_width(columns - first);
        float *panel = panels + first * inner;
        for (int64_t k = 0; k < inner; k += 8) {
            for (int64_t c = 0; c < width; c += 8) {
                const int64_t columns_left = columns - first - c;
                const float *from = weight + (first + c) * inner + k;
                float *to = panel + k * width + c;
                if (columns_left >= 8 && inner - k >= 8)
                    transpose_eight(from, inner, to, width);
                else
                    transpose_some(from, columns_left, at_most(8, inner - k), inner, to, width);
            }
        }
    }
}

/* Packs an [inner, columns] weight as it is, for products rows * weight. */
static void pack_matrix(const float *weight, int64_t inner, int64_t columns, float *panels,
                        int threads)
{
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t first = 0; first < columns; first += PANEL) {
        const int64_t left = columns - first;
        const int64_t width = panel_width(left);
        float *panel = panels + first * inner;
        for (int64_t k = 0; k < inner; k++) {
            const float *from = weight + k * columns + first;
            float *to = panel + k * width;
            if (left >= width) {
                for (int64_t c = 0; c < width; c += LANES)
                    *(lanes_t *)(to + c) = lanes(from + c);
            } else {
                memcpy(to, from, left * sizeof *to);
                memset(to + left, 0, (width - left) * sizeof *to);
            }
        }
    }
}

/* Products. */

/* The product of the rows of a tile and a panel of one or two vectors. Of the matrix, `left` columns
   are left; `columns` is the width of `out`. */
INLINE void tile_of(int rows_count, int vectors, const float *rows, int64_t inner,
                    const float *panel, const float *bias, int64_t left, float *out,
                    int64_t columns)
{
    lanes_t sums[TILE][2];
    UNROLL for (int m = 0; m < rows_count; m++) {
        UNROLL for (int v = 0; v < vectors; v++)
            sums[m][v] = lanes(bias + v * LANES);
    }
    for (int64_t k = 0; k < inner; k++) {
        lanes_t of_panel[2];
        UNROLL for (int v = 0; v < vectors; v++)
            of_panel[v] = lanes(panel + (k * vectors + v) * LANES);
        UNROLL for (int m = 0; m < rows_count; m++) {
            const float number = rows[m * inner + k];
            UNROLL for (int v = 0; v < vectors; v++)
                sums[m][v] += number * of_panel[v];
        }
    }
    UNROLL for (int m = 0; m < rows_count; m++) {
        if (left >= vectors * LANES) {
            UNROLL for (int v = 0; v < vectors; v++)
                *(lanes_t *)(out + m * columns + v * LANES) = sums[m][v];
        } else {
            memcpy(out + m * columns, sums[m], left * sizeof *out);
        }
    }
}

#define TILE_CASE(count)                                                                           \
    case count:                                                                                    \
        tile_of(count, vectors, rows, inner, panel, bias, left, out, columns);                     \
        break;

/* Calls tile_of with the number of rows as a constant, for which its loops are unrolled. */
INLINE void unrolled_tile(int64_t rows_count, int vectors, const float *rows, int64_t inner,
                          const float *panel, const float *bias, int64_t left, float *out,
                          int64_t columns)
{
    switch (rows_count) {
        TILE_CASE(1)
        TILE_CASE(2)
#if TILE > 2
        TILE_CASE(3)
        TILE_CASE(4)
        TILE_CASE(5)
        TILE_CASE(6)
#endif
#if TILE > 6
        TILE_CASE(7)
        TILE_CASE(8)
        TILE_CASE(9)
        TILE_CASE(10)
        TILE_CASE(11)
        TILE_CASE(12)
        TILE_CASE(13)
        TILE_CASE(14)
#endif
    }
}

/* The product of all rows and a panel, in tiles of about the same size. */
static void panel_product(const float *rows, int64_t count, int64_t inner, const float *panel,
                          const float *bias, int64_t left, float *out, int64_t columns)
{
    float padded_bias[PANEL] = {0};
    if (bias)
        memcpy(padded_bias, bias, at_most(PANEL, left) * sizeof *bias);
    const int64_t tiles = (count + TILE - 1) / TILE;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = count * tile / tiles;
        const int64_t size = count * (tile + 1) / tiles - first;
        const float *from = rows + first * inner;
        float *to = out + first * columns;
        if (left > LANES)
            unrolled_tile(size, 2, from, inner, panel, padded_bias, left, to, columns);
        else
            unrolled_tile(size, 1, from, inner, panel, padded_bias, left, to, columns);
    }
}

/* out = rows * matrix + bias, with [count, inner] rows and the panels of an [inner, columns]
   matrix. */
static void packed_product(const float *rows, int64_t count, int64_t inner, const float *panels,
                           const float *bias, int64_t columns, float *out, int threads)
{
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t first = 0; first < columns; first += PANEL)
        panel_product(rows, count, inner, panels + first * inner, bias ? bias + first : 0,
                      columns - first, out + first, columns);
}
