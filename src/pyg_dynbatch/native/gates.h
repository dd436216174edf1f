/* The gates of fused Tree-LSTMs on CPUs: one pass over the rows of a block, computed in float32.

   A part of kernels.c. Rows are contiguous. A row of bfloat16 is computed in a copy in float32.
   Children of a node stand side by side, so sums over them are the same at every run. */

/* Rows times columns from which more threads than one are worth waking. */
#define ENOUGH 16384

typedef float *restrict rows_t;
typedef const float *restrict given_t;
typedef const int64_t *restrict index_t;

/* x = n ln(2) + r with |r| <= ln(2)/2; returns r, and 2^n for n from -126 to 127. */
INLINE float reduced(float x, float *power)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number. */
    const float shifted = x * 1.44269504f + shift;
    const float n = shifted - shift;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3F800000;
    memcpy(power, &bits, sizeof bits);
    return x - n * 0.693359375f + n * 2.12194440e-4f;
}

/* e^r - 1 for |r| <= ln(2)/2, by a polynomial fitted to a relative error of 3e-9 of e^r. */
INLINE float growth(float r)
{
    float p = 1.38145307e-3f;
    p = p * r + 8.36877897e-3f;
    p = p * r + 4.16683890e-2f;
    p = p * r + 1.66665196e-1f;
    p = p * r + 0.5f;
    return p * r * r + r;
}

INLINE float between(float low, float x, float high)
{
    x = x < low ? low : x;
    return x > high ? high : x;
}

INLINE float exponential(float x)
{
    float power;
    const float p = growth(reduced(between(-87.0f, x, 88.0f), &power));
    return p * power + power;
}

/* 0 where it would be subnormal: `exponential` has no larger results. */
INLINE float logistic(float x)
{
    const float y = 1.0f / (1.0f + exponential(-x));
    return x < -87.0f ? 0.0f : y;
}

/* (e^2x - 1) / (e^2x + 1); near 0 no digits are lost, as there 2^n is 1. It is 1 beyond 10. */
INLINE float tangent(float x)
{
    float power;
    const float p = growth(reduced(between(-20.0f, 2.0f * x, 20.0f), &power));
    const float m = p * power + (power - 1.0f);
    return m / (m + 2.0f);
}

INLINE void add(int64_t count, rows_t rows, given_t more)
{
#pragma omp simd
    for (int64_t k = 0; k < count; k++)
        rows[k] += more[k];
}

/* Rows of bfloat16. */

typedef uint16_t *restrict half_rows_t;
typedef const uint16_t *restrict given_half_t;

INLINE float widened(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The nearest number, of two the even one. What is no number stays none. */
INLINE uint16_t narrowed(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : 0x7FC0);
}

INLINE void widen(int64_t count, given_half_t from, rows_t to)
{
#pragma omp simd
    for (int64_t k = 0; k < count; k++)
        to[k] = widened(from[k]);
}

INLINE void narrow(int64_t count, given_t from, half_rows_t to)
{
#pragma omp simd
    for (int64_t k = 0; k < count; k++)
        to[k] = narrowed(from[k]);
}

INLINE void add_half(int64_t count, rows_t rows, given_half_t more)
{
#pragma omp simd
    for (int64_t k = 0; k < count; k++)
        rows[k] += widened(more[k]);
}

/* The number at a place of rows that are bfloat16 if `half`. */
INLINE void *place_in(int64_t half, const void *rows, int64_t at)
{
    return (char *)rows + (half ? sizeof(uint16_t) : sizeof(float)) * at;
}

/* The numbers at a place in float32: themselves, or if `half` a copy in `room`. */
INLINE float *read_row(int64_t half, void *place, int64_t count, float *room)
{
    if (!half)
        return place;
    widen(count, place, room);
    return room;
}

/* Writes what was computed in `room`; what is float32 was computed in its place. */
INLINE void write_row(int64_t half, const float *room, int64_t count, void *place)
{
    if (half)
        narrow(count, room, place);
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
INLINE int64_t gate_columns(const struct nodes *all)
{
    return (3 + (all->arity > 0 ? all->arity : 0)) * all->width;
}

/* The forget gate of a child: in the row of its node, or in one of its own. */
INLINE void *forget_of(const struct nodes *all, struct gates gates, int64_t row, int64_t child,
                       int64_t first)
{
    if (all->arity < 0)
        return place_in(all->half, gates.forget, child * all->width);
    const int64_t at = row * gate_columns(all) + (3 + child - first) * all->width;
    return place_in(all->half, gates.rows, at);
}

INLINE int worth(const struct nodes *all, struct block at, int threads)
{
    return threads > 1 && at.size * all->width > ENOUGH;
}

/* Adds up the rows of the children of a node. */
INLINE void sum_children(const struct nodes *all, const void *rows, int64_t first, int64_t behind,
                         void *to)
{
    const int64_t width = all->width, half = all->half;
    float room[half ? width : 1], *sum = half ? room : to;
    memset(sum, 0, width * sizeof *sum);
    for (int64_t child = first; child < behind; child++)
        if (half)
            add_half(width, sum, place_in(half, rows, child * width));
        else
            add(width, sum, place_in(half, rows, child * width));
    write_row(half, room, width, to);
}

/* Copies h of the children of a block side by side, and adds them up where that is wanted. */
static void gather(const struct nodes *all, struct block at, int threads)
{
    const int64_t width = all->width, half = all->half;
    const int64_t *index = all->index + at.edge;
    const size_t row_size = (half ? sizeof(uint16_t) : sizeof(float)) * width;
    void *out = place_in(half, all->gathered, at.edge * width);
    PARALLEL_FOR(worth(all, at, threads))
    for (int64_t row = 0; row < at.size; row++) {
        int64_t first, behind;
        children_of(all, at, row, &first, &behind);
        for (int64_t child = first; child < behind; child++)
            memcpy(place_in(half, out, child * width),
                   place_in(half, all->all_hidden, index[child] * width), row_size);
        if (all->sums)
            sum_children(all, out, first, behind,
                         place_in(half, all->sums, (at.first + row) * width));
    }
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

/* The products at a place, in float32 where the gates will be or in `room`, with their bias. */
INLINE float *with_bias(int64_t half, void *product, void *gates, int64_t count, const float *bias,
                        float *room)
{
    float *row = read_row(half, product, count, room);
    if (!half && product != gates)
        row = memcpy(gates, product, count * sizeof *row);
    if (bias)
        add(count, row, bias);
    return row;
}

/* Activates the gates of a node, and writes c, tanh(c) and h; `own` is W x if it has an input. */
INLINE void forward_row(const struct nodes *all, struct block at, int64_t row,
                        struct gates products, struct gates gates, void *own)
{
    const int64_t width = all->width, half = all->half, *index = all->index + at.edge;
    const int64_t here = (at.first + row) * width, mine = row * gate_columns(all);
    float room[half ? 9 * width : 1], *of_forget = room + 3 * width;
    float *c = all->memory + here, *h = all->hidden + here;
    void *of_c = place_in(half, all->activated, here), *to = place_in(half, gates.rows, mine);
    float *input = own ? read_row(half, own, 4 * width, room + 5 * width) : 0;
    float *uio =
        with_bias(half, place_in(half, products.rows, mine), to, 3 * width, all->bias, room);
    if (input)
        add(3 * width, uio, input);
    candidate_of(width, uio, all->dropout_mask ? all->dropout_mask + here : 0, c);
    int64_t first, behind;
    children_of(all, at, row, &first, &behind);
    for (int64_t child = first; child < behind; child++) {
        void *to_forget = forget_of(all, gates, row, child, first);
        float *forget = with_bias(half, forget_of(all, products, row, child, first), to_forget,
                                  width, all->forget_bias, of_forget);
        carry(width, forget, input ? input + 3 * width : 0, all->all_memory + index[child] * width,
              c);
        write_row(half, forget, width, to_forget);
    }
    float *activated = half ? room + 4 * width : of_c;
    finish(width, uio + 2 * width, c, activated, h);
    write_row(half, uio, 3 * width, to);
    write_row(half, activated, width, of_c);
    if (half)
        narrow(width, h, all->half_hidden + here);
}

/* Activates products to gates, and writes c, tanh(c) and h; the first rows have an input. Where
   products and gates are the same rows, they are activated in place. */
static void forward(const struct nodes *all, struct block at, struct gates products,
                    struct gates gates, const void *own, int64_t filled, int threads)
{
    PARALLEL_FOR(worth(all, at, threads))
    for (int64_t row = 0; row < at.size; row++) {
        const int has_input = own && row < filled;
        void *input = has_input ? place_in(all->half, own, row * 4 * all->width) : 0;
        forward_row(all, at, row, products, gates, input);
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
            if (given->half)
                add_half(count, hidden + to, place_in(1, given->hidden, from));
            else
                add(count, hidden + to, place_in(0, given->hidden, from));
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

/* Writes the gradients of the products of a node, and those of the children's memory. */
INLINE void backward_row(const struct nodes *all, const struct incoming *given, struct block at,
                         int64_t row, struct gates gates, struct gates grads, float *to_memory)
{
    const int64_t width = all->width, half = all->half, *index = all->index + at.edge;
    const int64_t number = at.first + row, here = number * width, mine = row * gate_columns(all);
    const int64_t from = (given->place ? given->place[number] : number) * width;
    const float *outside_h = given->outside_hidden, *outside_c = given->outside_memory;
    float room[half ? 9 * width : 1], of_hidden[given->half ? width : 1];
    void *to = place_in(half, grads.rows, mine);
    const float *u = read_row(half, place_in(half, gates.rows, mine), 3 * width, room);
    const float *i = u + width, *o = i + width;
    float *to_u = half ? room + 3 * width : to, *to_i = to_u + width, *to_o = to_i + width;
    const float *activated =
        read_row(half, place_in(half, all->activated, here), width, room + 6 * width);
    const float *of_h =
        read_row(given->half, place_in(given->half, given->hidden, from), width, of_hidden);
    down_to_memory(width, o, activated, of_h,
                   outside_h ? outside_h + number * given->outside_hidden_row : 0,
                   given->memory + from,
                   outside_c ? outside_c + number * given->outside_memory_row : 0, to_o, to_i);
    int64_t first, behind;
    children_of(all, at, row, &first, &behind);
    for (int64_t child = first; child < behind; child++) {
        void *to_place = forget_of(all, grads, row, child, first);
        const float *forget =
            read_row(half, forget_of(all, gates, row, child, first), width, room + 7 * width);
        float *to_forget = half ? room + 8 * width : to_place;
        down_to_child(width, to_i, forget, all->all_memory + index[child] * width, to_forget,
                      to_memory + child * width);
        write_row(half, to_forget, width, to_place);
    }
    down_to_products(width, u, i, all->dropout_mask ? all->dropout_mask + here : 0, to_u, to_i);
    write_row(half, to_u, 3 * width, to);
}

/* Writes the gradients of products, and those of the children's memory. */
static void backward(const struct nodes *all, const struct incoming *given, struct block at,
                     struct gates gates, struct gates grads, float *to_memory, int threads)
{
    PARALLEL_FOR(worth(all, at, threads))
    for (int64_t row = 0; row < at.size; row++)
        backward_row(all, given, at, row, gates, grads, to_memory);
}
