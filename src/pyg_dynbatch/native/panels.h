/* Products of many rows with a matrix, float32. A part of kernels.c.

   The matrix is packed once, which takes as long as the product of some 50 rows. A panel holds the
   columns of two vectors, or of one at the end: for each number of a row, the weights of these
   columns. The sums of a tile of rows times a panel stay in registers. */

/* Rows of a tile: with their sums, a row of the panel and one number fill the registers. */
#ifdef __AVX512F__
#define TILE 14
#elif defined(__SSE2__) && !defined(__AVX2__)
#define TILE 2
#else
#define TILE 6
#endif
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

/* Two rows exchange every second number, pair of numbers, or half. */
#define EXCHANGE_NUMBERS(one, two)                                                                 \
    EXCHANGE(one, two, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15))
#define EXCHANGE_PAIRS(one, two)                                                                   \
    EXCHANGE(one, two, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
#define EXCHANGE_HALVES(one, two)                                                                  \
    EXCHANGE(one, two, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
#define UNWRAPPED(...) __VA_ARGS__
#define EXCHANGE(one, two, first, second)                                                          \
    {                                                                                              \
        const eight_t before = one;                                                                \
        one = SHUFFLE(before, two, UNWRAPPED first);                                               \
        two = SHUFFLE(before, two, UNWRAPPED second);                                              \
    }

/* to[k][c] = from[c][k] for eight rows and columns; rows are `stride` and `apart`. */
INLINE void transpose_eight(const float *from, int64_t stride, float *to, int64_t apart)
{
    eight_t row[8];
    UNROLL for (int c = 0; c < 8; c++)
        memcpy(&row[c], from + c * stride, sizeof row[c]);
    UNROLL for (int c = 0; c < 8; c += 2)
        EXCHANGE_NUMBERS(row[c], row[c + 1])
    UNROLL for (int c = 0; c < 8; c += c % 2 ? 3 : 1)
        EXCHANGE_PAIRS(row[c], row[c + 2])
    UNROLL for (int c = 0; c < 4; c++)
        EXCHANGE_HALVES(row[c], row[c + 4])
    UNROLL for (int k = 0; k < 8; k++)
        memcpy(to + k * apart, &row[k], sizeof row[k]);
}

/* The same for fewer rows or columns, with zeros for missing rows. */
static void transpose_some(const float *from, int64_t rows_count, int64_t columns, int64_t stride,
                           float *to, int64_t apart)
{
    for (int64_t k = 0; k < columns; k++)
        for (int64_t c = 0; c < 8; c++)
            to[k * apart + c] = c < rows_count ? from[c * stride + k] : 0.0f;
}

/* Packs a [columns, inner] matrix for products with rows of `inner` numbers: each panel holds, for
   each of these, the weights of its columns, and zeros behind the last column. */
static void pack_rows(const float *weight, int64_t columns, int64_t inner, float *panels,
                      int threads)
{
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t first = 0; first < columns; first += PANEL) {
        const int64_t width = panel_width(columns - first);
        float *panel = panels + first * inner;
        for (int64_t k = 0; k < inner; k += 8) {
            for (int64_t c = 0; c < width; c += 8) {
                const int64_t rows_count = columns - first - c;
                const float *from = weight + (first + c) * inner + k;
                float *to = panel + k * width + c;
                if (rows_count >= 8 && inner - k >= 8)
                    transpose_eight(from, inner, to, width);
                else
                    transpose_some(from, rows_count, at_most(8, inner - k), inner, to, width);
            }
        }
    }
}

/* Packs the transpose of a [columns, inner] matrix, for products with rows of `columns` numbers. */
static void pack_columns(const float *weight, int64_t columns, int64_t inner, float *panels,
                         int threads)
{
    PARALLEL_FOR(threads > 1 && columns * inner > LARGE)
    for (int64_t first = 0; first < inner; first += PANEL) {
        const int64_t left = inner - first, width = panel_width(left);
        float *panel = panels + first * columns;
        for (int64_t c = 0; c < columns; c++) {
            const float *from = weight + c * inner + first;
            float *to = panel + c * width;
            if (left >= width) {
                for (int64_t k = 0; k < width; k += LANES)
                    *(lanes_t *)(to + k) = lanes(from + k);
            } else {
                memcpy(to, from, left * sizeof *to);
                memset(to + left, 0, (width - left) * sizeof *to);
            }
        }
    }
}

/* out[m][c] = bias[c] + sum of rows[m][k] * panel[k][c] over k, for the rows of a tile and the
   columns of a panel, of which `left` exist. */
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

/* The number of rows as a constant. */
INLINE void tile_with(int64_t rows_count, int vectors, const float *rows, int64_t inner,
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

/* The columns of one panel for all rows, in tiles of about the same size. */
static void panel_product(const float *rows, int64_t count, int64_t inner, const float *panel,
                          const float *bias, int64_t left, float *out, int64_t columns)
{
    float own_bias[PANEL] = {0};
    if (bias)
        memcpy(own_bias, bias, at_most(PANEL, left) * sizeof *bias);
    const int64_t tiles = (count + TILE - 1) / TILE;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t m = count * tile / tiles, size = count * (tile + 1) / tiles - m;
        const float *some = rows + m * inner;
        float *to = out + m * columns;
        if (left > LANES)
            tile_with(size, 2, some, inner, panel, own_bias, left, to, columns);
        else
            tile_with(size, 1, some, inner, panel, own_bias, left, to, columns);
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
