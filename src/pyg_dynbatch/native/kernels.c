/* The kernels of fused Tree-LSTMs and weave networks, compiled once per kind of processor: setup.py
   defines VARIANT.

   It includes them: gates.h computes blocks of nodes from products computed elsewhere, weave.h pairs
   of atoms. What follows are whole runs in one call, with products of our own: products.h for a few
   rows, panels.h for many. */

#include "tree_lstm.h"
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__) && !defined(__APPLE__)
#define PARALLEL_FOR(worth) /* Clang calls another OpenMP runtime than that of torch's wheels. */
#else
#define PARALLEL_FOR(worth) PRAGMA(omp parallel for num_threads(threads) if (worth))
#endif

#include "products.h"

#include "gates.h"
#include "panels.h"
#include "weave.h"

/* Nodes whose gates are computed together, so that they stay in the cache. */
#define BLOCK 128

static struct nodes leaves_of(const struct run *r)
{
    return (struct nodes){.width = r->width,
                          .arity = 0,
                          .hidden = r->leaf_hidden,
                          .memory = r->leaf_memory,
                          .activated = r->leaf_activated,
                          .dropout_mask = r->dropout_mask,
                          .index = r->index};
}

static struct nodes inner_nodes_of(const struct run *r)
{
    const int64_t first = (1 + r->leaves) * r->width; /* After the row for missing children. */
    return (struct nodes){.width = r->width,
                          .arity = r->arity,
                          .hidden = r->hidden + first,
                          .memory = r->memory + first,
                          .activated = r->activated + first,
                          .dropout_mask =
                              r->dropout_mask ? r->dropout_mask + r->leaves * r->width : 0,
                          .index = r->index,
                          .starts = r->starts,
                          .all_hidden = r->hidden,
                          .all_memory = r->memory,
                          .gathered = r->gathered,
                          .sums = r->sums};
}

/* out = rows * weight^T + bias, with [count, inner] rows and a [columns, inner] weight, or its
   panels if there are some. At most BLOCK rows at a time, so that they stay in the cache. */
static void product(const float *rows, int64_t count, int64_t inner, const float *weight,
                    const float *panels, const float *bias, int64_t columns, float *out,
                    int threads)
{
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t size = at_most(BLOCK, count - first);
        const float *from = rows + first * inner;
        float *to = out + first * columns;
        if (panels)
            packed_product(from, size, inner, panels, bias, columns, to, threads);
        else
            narrow_product(from, size, inner, weight, bias, columns, to, threads);
    }
}

/* out = grads * weight, with [count, columns] grads and a [columns, inner] weight, or the panels of
   its transpose if there are some. */
static void product_back(const float *grads, int64_t count, int64_t columns, const float *weight,
                         const float *panels, int64_t inner, float *out, int threads)
{
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t size = at_most(BLOCK, count - first);
        const float *from = grads + first * columns;
        float *to = out + first * inner;
        if (panels)
            packed_product(from, size, columns, panels, 0, inner, to, threads);
        else
            narrow_product_back(from, size, columns, weight, inner, to, threads);
    }
}

/* Gives every leaf the states of its computed leaf. */
static void copy_equal_leaves(const struct run *r, int threads)
{
    const int64_t width = r->width;
    PARALLEL_FOR(threads > 1 && r->leaves * width > ENOUGH)
    for (int64_t leaf = 0; leaf < r->leaves; leaf++) {
        const int64_t from = r->leaf_of[leaf] * width;
        const int64_t to = (1 + leaf) * width;
        memcpy(r->hidden + to, r->leaf_hidden + from, width * sizeof *r->hidden);
        memcpy(r->memory + to, r->leaf_memory + from, width * sizeof *r->memory);
    }
}

static void forward_leaves(const struct run *r, int threads)
{
    const struct nodes leaves = leaves_of(r);
    const int64_t columns = gate_columns(&leaves);
    for (int64_t first = 0; first < r->cells; first += BLOCK) {
        const int64_t size = at_most(BLOCK, r->cells - first);
        const int64_t inputs_left = first < r->inputs ? r->inputs - first : 0;
        const int64_t with_input = at_most(size, inputs_left);
        product(r->rows + first * r->features, with_input, r->features, r->weight_input,
                r->packed_input, r->bias, columns, r->products, threads);
        /* A missing input is an input of zeros, of which the bias is left. */
        for (int64_t row = with_input; row < size; row++)
            memcpy(r->products + row * columns, r->bias, columns * sizeof *r->bias);
        const struct gates products = {r->products, 0};
        const struct gates kept = {r->leaf_gates + first * columns, 0};
        forward(&leaves, (struct block){first, size, 0, 0}, products, r->keeps ? kept : products, 0,
                0, threads);
    }
    if (r->leaf_of)
        copy_equal_leaves(r, threads);
}

/* With any number of children, a node's u, i and o read the sum of h, and every child has a forget
   gate in a row of its own. */
static int has_any_arity(const struct run *r)
{
    return r->arity < 0;
}

/* Numbers that the weights of the gates in the row of a node multiply: the sum of h, or all h. */
static int64_t operand_width(const struct run *r)
{
    return has_any_arity(r) ? r->width : r->arity * r->width;
}

/* The weights of forget gates in rows of their own. */
static const float *forget_weight(const struct run *r)
{
    return r->weight_hidden + 3 * r->width * r->width;
}

/* Where the children of an inner node begin. */
static int64_t first_child(const struct run *r, int64_t node)
{
    return has_any_arity(r) ? r->starts[node] : node * r->arity;
}

/* The block of nodes from `first` on, of a level that ends at `end`. */
static struct block block_at(const struct run *r, int64_t first, int64_t end)
{
    const int64_t size = at_most(BLOCK, end - first);
    const int64_t edge = first_child(r, first);
    const int64_t behind = first + size < r->inner ? first_child(r, first + size) : r->slots;
    return (struct block){first, size, edge, behind - edge};
}

static void pack_for_forward(const struct run *r, int threads)
{
    const struct nodes inner = inner_nodes_of(r);
    if (r->packed_input)
        pack_transpose(r->weight_input, 3 * r->width, r->features, r->packed_input, threads);
    if (r->packed_hidden)
        pack_transpose(r->weight_hidden, gate_columns(&inner), operand_width(r), r->packed_hidden,
                       threads);
    if (r->packed_forget)
        pack_transpose(forget_weight(r), r->width, r->width, r->packed_forget, threads);
}

/* All children of a node share the bias of the forget gate. */
static void repeat_forget_bias(const struct run *r)
{
    const int64_t width = r->width;
    memcpy(r->all_bias, r->bias, 3 * width * sizeof *r->bias);
    for (int64_t child = 0; child < r->arity; child++)
        memcpy(r->all_bias + (3 + child) * width, r->bias + 3 * width, width * sizeof *r->bias);
}

/* `own` is W x of the first nodes of the block, which have an input. */
static void forward_block(const struct run *r, const struct nodes *inner, struct block at,
                          const float *own, int64_t with_input, int threads)
{
    const int64_t width = r->width;
    const int64_t columns = gate_columns(inner);
    const float *children = r->gathered + at.edge * width;
    const float *operand = has_any_arity(r) ? r->sums + at.first * width : children;
    float *forget = 0;
    gather(inner, at, threads);
    product(operand, at.size, operand_width(r), r->weight_hidden, r->packed_hidden, r->all_bias,
            columns, r->products, threads);
    if (has_any_arity(r)) {
        forget = r->forget + (r->keeps ? at.edge * width : 0);
        product(children, at.edges, width, forget_weight(r), r->packed_forget, r->bias + 3 * width,
                width, forget, threads);
    }
    const struct gates products = {r->products, forget};
    const struct gates kept = {r->gates + at.first * columns, forget};
    forward(inner, at, products, r->keeps ? kept : products, own, with_input, threads);
}

/* All leaves, then all levels above them. */
static void forward_run(const struct run *r)
{
    const struct nodes inner = inner_nodes_of(r);
    const int threads = (int)r->threads;
    const int64_t width = r->width;
    memset(r->hidden, 0, width * sizeof *r->hidden);
    memset(r->memory, 0, width * sizeof *r->memory);
    pack_for_forward(r, threads);
    repeat_forget_bias(r);
    forward_leaves(r, threads);

    int64_t first = 0;
    const float *own = r->own;
    for (int64_t level = 1; level < r->levels; level++) {
        const int64_t end = first + r->sizes[level];
        int64_t inputs_left = r->filled[level];
        while (first < end) {
            const struct block block = block_at(r, first, end);
            const int64_t with_input = at_most(block.size, inputs_left);
            forward_block(r, &inner, block, own, with_input, threads);
            first += block.size;
            inputs_left -= with_input;
            if (own)
                own += with_input * 4 * width;
        }
    }
}

static void pack_for_backward(const struct run *r, int threads)
{
    const struct nodes inner = inner_nodes_of(r);
    if (r->packed_hidden)
        pack_matrix(r->weight_hidden, gate_columns(&inner), operand_width(r), r->packed_hidden,
                    threads);
    if (r->packed_forget)
        pack_matrix(forget_weight(r), r->width, r->width, r->packed_forget, threads);
}

/* The gradients of the inner nodes among those of all nodes. */
static struct incoming incoming_of_inner_nodes(const struct run *r)
{
    struct incoming of_inner = *r->given;
    of_inner.place += r->leaves;
    if (of_inner.outside_hidden)
        of_inner.outside_hidden += r->leaves * of_inner.outside_hidden_row;
    if (of_inner.outside_memory)
        of_inner.outside_memory += r->leaves * of_inner.outside_memory_row;
    return of_inner;
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

/* Writes the gradients of the products of a block, and those of h and c of its children. */
static void backward_block(const struct run *r, const struct nodes *inner,
                           const struct incoming *of_inner, struct block at, int threads)
{
    const int64_t width = r->width;
    const int64_t columns = gate_columns(inner);
    const int64_t row = at.first * columns;
    const int64_t child = at.edge * width;
    struct gates gates = {r->gates + row, 0};
    struct gates grads = {r->grads + row, 0};
    if (has_any_arity(r)) {
        gates.forget = r->forget + child;
        grads.forget = r->to_forget + child;
    }
    backward(inner, of_inner, at, gates, grads, r->to_memory + child, threads);

    float *to_hidden = r->to_hidden + child;
    float *to_operand = has_any_arity(r) ? r->to_sums : to_hidden;
    product_back(grads.rows, at.size, columns, r->weight_hidden, r->packed_hidden, operand_width(r),
                 to_operand, threads);
    if (has_any_arity(r)) {
        product_back(grads.forget, at.edges, width, forget_weight(r), r->packed_forget, width,
                     to_hidden, threads);
        add_sums(inner, at, r->to_sums, to_hidden);
    }
}

static void backward_leaves(const struct run *r, int threads)
{
    const struct nodes leaves = leaves_of(r);
    const struct incoming *of_leaves = r->given;
    if (r->leaf_of) {
        of_leaves = r->of_cells;
        sum_equal(r->given, r->leaf_of, r->leaves, r->width, (float *)of_leaves->hidden,
                  (float *)of_leaves->memory, threads);
    }
    const struct gates gates = {r->leaf_gates, 0};
    const struct gates grads = {r->leaf_grads, 0};
    backward(&leaves, of_leaves, (struct block){0, r->cells, 0, 0}, gates, grads, 0, threads);
}

/* From the last level down to the leaves; every node has one parent at most. */
static void backward_run(const struct run *r)
{
    const struct nodes inner = inner_nodes_of(r);
    const struct incoming of_inner = incoming_of_inner_nodes(r);
    const int threads = (int)r->threads;
    pack_for_backward(r, threads);
    int64_t end = r->inner;
    for (int64_t level = r->levels - 1; level > 0; level--) {
        const int64_t start = end - r->sizes[level];
        for (int64_t first = start; first < end; first += BLOCK)
            backward_block(r, &inner, &of_inner, block_at(r, first, end), threads);
        end = start;
    }
    backward_leaves(r, threads);
}

/* The value of VARIANT as a name and as a text: macros expand it on the way to `#` and `##`. */
#define JOINED(variant) variant##_kernels
#define NAMED(variant) JOINED(variant)
#define TEXT(variant) #variant
#define QUOTED(variant) TEXT(variant)

extern const struct kernels NAMED(VARIANT);
const struct kernels NAMED(VARIANT) = {
    .name = QUOTED(VARIANT),
    .gather = gather,
    .forward = forward,
    .backward = backward,
    .sum_equal = sum_equal,
    .forward_run = forward_run,
    .backward_run = backward_run,
    .order_relu = order_relu,
    .histogram = histogram,
    .pair_layers = pair_layers,
};
