/* The gates of fused Tree-LSTMs on CPUs: one pass over the rows of a block, float32.

   A part of kernels.c. Rows are contiguous. Children of a node stand side by side, so sums over
   them are the same at every run. */

/* Rows times columns from which more threads than one are worth waking. */
#define ENOUGH 16384

typedef float *restrict rows_t;
typedef const float *restrict given_t;
typedef const int64_t *restrict index_t;

/* e^x = 2^n e^r with |r| <= ln(2)/2; e^r by a polynomial fitted to a relative error of 3e-9. */
INLINE float exponential(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number. */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + shift;
    float n = shifted - shift;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.38145307e-3f;
    p = p * r + 8.36877897e-3f;
    p = p * r + 4.16683890e-2f;
    p = p * r + 1.66665196e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    uint32_t bits, of_p;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&of_p, &p, sizeof of_p);
    of_p += bits << 23;
    memcpy(&p, &of_p, sizeof p);
    /* The bits of what is no number would become part of n. */
    return x == x ? p : x;
}

INLINE float logistic(float x)
{
    return 1.0f / (1.0f + exponential(-x));
}

/* An odd polynomial near 0, where 1 - 2 / (1 + e^2x) would lose digits. */
INLINE float tangent(float x)
{
    float size = x < 0.0f ? -x : x;
    float far = 1.0f - 2.0f / (1.0f + exponential(2.0f * size));
    far = x < 0.0f ? -far : far;
    float z = x * x;
    float near = 1.72414910e-2f;
    near = near * z - 5.30454889e-2f;
    near = near * z + 1.33258790e-1f;
    near = near * z - 3.33331436e-1f;
    near = near * z * x + x;
    return size < 0.5f ? near : far;
}

/* First child of a node of the block, counted from the block's first, and their end. */
INLINE void children_of(const struct nodes *all, struct block at, int64_t row, int64_t *first,
                        int64_t *behind)
{
    if (all->arity < 0) {
        const int64_t *starts = all->starts + at.first;
        *first = starts[row] - at.edge;
        *behind = row + 1 < at.size ? starts[row + 1] - at.edge : at.edges;
    } else {
        *first = row * all->arity;
        *behind = *first + all->arity;
    }
}

/* Columns of a row of gates: u, i, o, and the forget gates of a fixed number of children. */
INLINE int64_t columns(const struct nodes *all)
{
    return (3 + (all->arity > 0 ? all->arity : 0)) * all->width;
}

/* The forget gate of a child: in the row of its node, or in one of its own. */
INLINE float *forget_of(const struct nodes *all, float *rows, float *forget, int64_t row,
                        int64_t child, int64_t first)
{
    if (all->arity < 0)
        return forget + child * all->width;
    return rows + row * columns(all) + (3 + child - first) * all->width;
}

INLINE int worth(const struct nodes *all, struct block at, int threads)
{
    return threads > 1 && at.size * all->width > ENOUGH;
}

/* Copies h of the children of a block side by side, and adds them up where that is wanted. */
static void gather(const struct nodes *all, struct block at, int threads)
{
    const int64_t width = all->width;
    const int64_t *index = all->index + at.edge;
    float *out = all->gathered + at.edge * width;
    PARALLEL_FOR(worth(all, at, threads))
    for (int64_t row = 0; row < at.size; row++) {
        int64_t first, behind;
        children_of(all, at, row, &first, &behind);
        for (int64_t child = first; child < behind; child++)
            memcpy(out + child * width, all->all_hidden + index[child] * width,
                   width * sizeof *out);
        if (all->sums) {
            float *restrict sum = all->sums + (at.first + row) * width;
            memset(sum, 0, width * sizeof *sum);
            for (int64_t child = first; child < behind; child++) {
                const float *restrict one = out + child * width;
#pragma omp simd
                for (int64_t k = 0; k < width; k++)
                    sum[k] += one[k];
            }
        }
    }
}

INLINE void add(int64_t count, rows_t rows, given_t more)
{
#pragma omp simd
    for (int64_t k = 0; k < count; k++)
        rows[k] += more[k];
}

INLINE void candidate_of(int64_t width, rows_t gates, given_t dropout_mask, rows_t memory)
{
    rows_t u = gates, i = gates + width, o = gates + 2 * width;
#pragma omp simd
    for (int64_t k = 0; k < width; k++)
        u[k] = tangent(u[k]);
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        i[k] = logistic(i[k]);
        o[k] = logistic(o[k]);
        memory[k] = u[k] * i[k];
    }
    if (dropout_mask) {
#pragma omp simd
        for (int64_t k = 0; k < width; k++)
            memory[k] *= dropout_mask[k];
    }
}

INLINE void carry(int64_t width, rows_t forget, given_t own, given_t cell, rows_t memory)
{
    if (own)
        add(width, forget, own);
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        forget[k] = logistic(forget[k]);
        memory[k] += forget[k] * cell[k];
    }
}

INLINE void finish(int64_t width, given_t o, given_t memory, rows_t activated, rows_t hidden)
{
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        activated[k] = tangent(memory[k]);
        hidden[k] = o[k] * activated[k];
    }
}

/* Activates the gates in place, and writes c, tanh(c) and h; the first rows have an input. */
static void forward(const struct nodes *all, struct block at, float *gates, float *forget,
                    const float *own, int64_t filled, int threads)
{
    const int64_t width = all->width;
    const int64_t *index = all->index + at.edge;
    PARALLEL_FOR(worth(all, at, threads))
    for (int64_t row = 0; row < at.size; row++) {
        const int64_t here = (at.first + row) * width;
        float *mine = gates + row * columns(all), *c = all->memory + here;
        const float *input = own && row < filled ? own + row * 4 * width : 0;
        if (input)
            add(3 * width, mine, input);
        candidate_of(width, mine, all->dropout_mask ? all->dropout_mask + here : 0, c);
        int64_t first, behind;
        children_of(all, at, row, &first, &behind);
        for (int64_t child = first; child < behind; child++)
            carry(width, forget_of(all, gates, forget, row, child, first),
                  input ? input + 3 * width : 0, all->cells + index[child] * width, c);
        finish(width, mine + 2 * width, c, all->activated + here, all->hidden + here);
    }
}

/* Adds up the gradients of equal leaves, which were computed once; always in the same order. */
static void sum_equal(const struct incoming *given, const int64_t *cell, int64_t leaves,
                      int64_t width, float *hidden, float *memory, int threads)
{
    /* Every thread has columns of its own, so that no two write to one row. */
    PARALLEL_FOR(threads > 1 && leaves * width > ENOUGH)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t start = width * part / threads, count = width * (part + 1) / threads - start;
        for (int64_t leaf = 0; leaf < leaves; leaf++) {
            const int64_t from = (given->place ? given->place[leaf] : leaf) * width + start;
            const int64_t to = cell[leaf] * width + start;
            const float *of_h = given->outside_hidden, *of_c = given->outside_memory;
            add(count, hidden + to, given->hidden + from);
            add(count, memory + to, given->memory + from);
            if (of_h)
                add(count, hidden + to, of_h + leaf * given->outside_hidden_row + start);
            if (of_c)
                add(count, memory + to, of_c + leaf * given->outside_memory_row + start);
        }
    }
}

/* The gradient of o goes to its place; that of c waits where the gradient of i will go. */
INLINE void down_to_memory(int64_t width, given_t o, given_t activated, given_t of_h,
                           given_t of_h_too, given_t of_c, given_t of_c_too, rows_t to_o,
                           rows_t total)
{
    if (of_h_too) {
#pragma omp simd
        for (int64_t k = 0; k < width; k++)
            total[k] = of_h[k] + of_h_too[k];
    } else {
        memcpy(total, of_h, width * sizeof *total);
    }
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        float h = total[k];
        to_o[k] = h * activated[k] * o[k] * (1.0f - o[k]);
        total[k] = of_c[k] + h * o[k] * (1.0f - activated[k] * activated[k]);
    }
    if (of_c_too)
        add(width, total, of_c_too);
}

INLINE void down_to_child(int64_t width, given_t total, given_t forget, given_t cell,
                          rows_t to_forget, rows_t to_cell)
{
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        to_forget[k] = total[k] * cell[k] * forget[k] * (1.0f - forget[k]);
        to_cell[k] = total[k] * forget[k];
    }
}

INLINE void down_to_products(int64_t width, given_t u, given_t i, given_t dropout_mask, rows_t to_u,
                             rows_t to_i)
{
    if (dropout_mask) {
#pragma omp simd
        for (int64_t k = 0; k < width; k++)
            to_i[k] *= dropout_mask[k];
    }
#pragma omp simd
    for (int64_t k = 0; k < width; k++) {
        float candidate = to_i[k];
        to_u[k] = candidate * i[k] * (1.0f - u[k] * u[k]);
        to_i[k] = candidate * u[k] * i[k] * (1.0f - i[k]);
    }
}

/* Writes the gradients of products, and those of the children's memory. */
static void backward(const struct nodes *all, const struct incoming *given, struct block at,
                     float *gates, float *forget, float *grads, float *to_forget, float *to_cells,
                     int threads)
{
    const int64_t width = all->width;
    const int64_t *index = all->index + at.edge;
    const float *of_h = given->outside_hidden, *of_c = given->outside_memory;
    PARALLEL_FOR(worth(all, at, threads))
    for (int64_t row = 0; row < at.size; row++) {
        const int64_t number = at.first + row, here = number * width;
        const int64_t from = (given->place ? given->place[number] : number) * width;
        const float *u = gates + row * columns(all), *i = u + width, *o = i + width;
        float *to_u = grads + row * columns(all), *to_i = to_u + width, *to_o = to_i + width;
        down_to_memory(width, o, all->activated + here, given->hidden + from,
                       of_h ? of_h + number * given->outside_hidden_row : 0, given->memory + from,
                       of_c ? of_c + number * given->outside_memory_row : 0, to_o, to_i);
        int64_t first, behind;
        children_of(all, at, row, &first, &behind);
        for (int64_t child = first; child < behind; child++)
            down_to_child(width, to_i, forget_of(all, gates, forget, row, child, first),
                          all->cells + index[child] * width,
                          forget_of(all, grads, to_forget, row, child, first),
                          to_cells + child * width);
        down_to_products(width, u, i, all->dropout_mask ? all->dropout_mask + here : 0, to_u, to_i);
    }
}
