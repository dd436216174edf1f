/* All levels of a fused Tree-LSTM in one call, for runs whose levels are so narrow that calls from
   Python, block by block, would take as long as the work. Products are computed by the BLAS that
   comes with torch; native_gates.py calls this. */

#include "narrow_products.c"
#include "native_gates.c"

/* sgemm of Fortran, by columns. Whole numbers have 64 bits, of which a BLAS with 32 reads the low
   ones; native_gates.py multiplies once to see whether that holds. */
typedef void (*multiply_t)(const char *, const char *, const int64_t *, const int64_t *,
                           const int64_t *, const float *, const float *, const int64_t *,
                           const float *, const int64_t *, const float *, float *,
                           const int64_t *);

/* A row of the table of blocks, as in fused_gates.py. */
struct level_block {
    int64_t first, size, input, filled, edge, edges, start;
};

struct levels {
    int64_t count;
    int64_t kept; /* Whether each block has separate rows in gates and forget. */
    multiply_t multiply;
    const struct level_block *blocks;
    /* Weight and bias of the gates in a node's row, and of forget gates in separate rows. */
    const float *weight, *bias, *weight_forget, *bias_forget;
    const float *own;     /* Products of the inputs of inner nodes. */
    float *gates, *forget;
    float *grads, *to_forget, *to_memory, *to_hidden, *to_sums;
};

/* out = rows * weight^T + bias, with [count, inner] rows and a [columns, inner] weight. */
static void product(multiply_t multiply, const float *rows, int64_t count, int64_t inner,
                    const float *weight, const float *bias, int64_t columns, float *out,
                    int threads)
{
    const float one = 1.0f;
    if (IS_NARROW(count, inner)) {
        narrow_product(rows, count, inner, weight, bias, columns, out, threads);
        return;
    }
    for (int64_t row = 0; row < count; row++)
        memcpy(out + row * columns, bias, columns * sizeof *out);
    multiply("T", "N", &columns, &count, &inner, &one, weight, &inner, rows, &inner, &one, out,
             &columns);
}

/* out = grads * weight, with [count, columns] grads and a [columns, inner] weight. */
static void product_back(multiply_t multiply, const float *grads, int64_t count, int64_t columns,
                         const float *weight, int64_t inner, float *out, int threads)
{
    const float one = 1.0f, none = 0.0f;
    if (IS_NARROW(count, inner)) {
        narrow_product_back(grads, count, columns, weight, inner, out, threads);
        return;
    }
    multiply("N", "N", &inner, &count, &columns, &one, weight, &inner, grads, &columns, &none, out,
             &inner);
}

/* From the first level above the leaves to the last. */
void tree_lstm_forward_levels(const struct nodes *all, const struct levels *levels, int threads)
{
    const int64_t width = all->width, ragged = all->arity < 0;
    for (int64_t number = 0; number < levels->count; number++) {
        const struct level_block b = levels->blocks[number];
        float *gates = levels->gates + (levels->kept ? b.first * columns(all) : 0);
        float *forget = levels->forget + (levels->kept && ragged ? b.edge * width : 0);
        const float *children = all->gathered + b.edge * width;
        tree_lstm_gather(all, b.first, b.size, b.edge, b.edges, threads);
        product(levels->multiply, ragged ? all->sums + b.first * width : children, b.size,
                ragged ? width : all->arity * width, levels->weight, levels->bias, columns(all),
                gates, threads);
        if (ragged)
            product(levels->multiply, children, b.edges, width, levels->weight_forget,
                    levels->bias_forget, width, forget, threads);
        tree_lstm_forward(all, b.first, b.size, b.edge, b.edges, gates, forget,
                          levels->own ? levels->own + b.input * 4 * width : 0, b.filled, threads);
    }
}

/* The gradient of the sum of h goes to every child of a node. */
static void add_sums(const struct nodes *all, struct block at, const float *sums, float *out)
{
    for (int64_t row = 0; row < at.size; row++) {
        int64_t first, behind;
        children_of(all, at, row, &first, &behind);
        for (int64_t child = first; child < behind; child++)
            add(all->width, out + child * all->width, sums + row * all->width);
    }
}

/* From the last level down to the first; every node has one parent at most. */
void tree_lstm_backward_levels(const struct nodes *all, const struct incoming *given,
                               const struct levels *levels, int threads)
{
    const int64_t width = all->width, ragged = all->arity < 0;
    for (int64_t number = levels->count - 1; number >= 0; number--) {
        const struct level_block b = levels->blocks[number];
        const struct block at = {b.first, b.size, b.edge, b.edges};
        const int64_t row = b.first * columns(all), child = b.edge * width;
        float *grads = levels->grads + row, *to_hidden = levels->to_hidden + child;
        float *forget = levels->forget + (ragged ? child : 0);
        float *to_forget = levels->to_forget + (ragged ? child : 0);
        tree_lstm_backward(all, given, b.first, b.size, b.edge, b.edges, levels->gates + row,
                           forget, grads, to_forget, levels->to_memory + child, threads);
        if (ragged) {
            product_back(levels->multiply, grads, b.size, columns(all), levels->weight, width,
                         levels->to_sums, threads);
            product_back(levels->multiply, to_forget, b.edges, width, levels->weight_forget,
                         width, to_hidden, threads);
            add_sums(all, at, levels->to_sums, to_hidden);
        } else {
            product_back(levels->multiply, grads, b.size, columns(all), levels->weight,
                         all->arity * width, to_hidden, threads);
        }
    }
}
