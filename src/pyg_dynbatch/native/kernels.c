/* The kernels of fused Tree-LSTMs and weave networks, compiled once per kind of processor: setup.py
   defines VARIANT.

   Blocks of nodes, for products computed elsewhere, and whole runs in one call, with products of
   our own. */

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
    const int64_t first = (1 + r->leaves) * r->width, below = r->leaves * r->width;
    return (struct nodes){.width = r->width,
                          .arity = r->arity,
                          .hidden = r->hidden + first,
                          .memory = r->memory + first,
                          .activated = r->activated + first,
                          .dropout_mask = r->dropout_mask ? r->dropout_mask + below : 0,
                          .index = r->index,
                          .starts = r->starts,
                          .all_hidden = r->hidden,
                          .cells = r->memory,
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
        const float *some = rows + first * inner;
        float *to = out + first * columns;
        if (panels)
            packed_product(some, size, inner, panels, bias, columns, to, threads);
        else
            narrow_product(some, size, inner, weight, bias, columns, to, threads);
    }
}

/* out = grads * weight, with [count, columns] grads and a [columns, inner] weight, or the panels of
   its transpose if there are some. */
static void product_back(const float *grads, int64_t count, int64_t columns, const float *weight,
                         const float *panels, int64_t inner, float *out, int threads)
{
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t size = at_most(BLOCK, count - first);
        const float *some = grads + first * columns;
        float *to = out + first * inner;
        if (panels)
            packed_product(some, size, columns, panels, 0, inner, to, threads);
        else
            narrow_product_back(some, size, columns, weight, inner, to, threads);
    }
}

static void forward_leaves(const struct run *r, int threads)
{
    const struct nodes all = leaves_of(r);
    const int64_t width = r->width;
    for (int64_t first = 0; first < r->cells; first += BLOCK) {
        const int64_t size = r->cells - first < BLOCK ? r->cells - first : BLOCK;
        const int64_t missing = first + size - r->inputs;
        const int64_t filled = missing < 0 ? size : missing > size ? 0 : size - missing;
        product(r->rows + first * r->features, filled, r->features, r->weight_input,
                r->packed_input, r->bias, 3 * width, r->products, threads);
        /* A missing input is an input of zeros. */
        for (int64_t row = filled; row < size; row++)
            memcpy(r->products + row * columns(&all), r->bias, columns(&all) * sizeof *r->bias);
        const struct gates products = {r->products, 0};
        const struct gates gates = {r->leaf_gates + first * columns(&all), 0};
        forward(&all, (struct block){first, size, 0, 0}, products, r->keeps ? gates : products, 0,
                0, threads);
    }
    PARALLEL_FOR(threads > 1 && r->leaves * width > ENOUGH)
    for (int64_t leaf = 0; leaf < (r->leaf_of ? r->leaves : 0); leaf++) {
        const int64_t to = (1 + leaf) * width, from = r->leaf_of[leaf] * width;
        memcpy(r->hidden + to, r->leaf_hidden + from, width * sizeof *r->hidden);
        memcpy(r->memory + to, r->leaf_memory + from, width * sizeof *r->memory);
    }
}

/* Where the children of an inner node begin. */
static int64_t first_child(const struct run *r, int64_t node)
{
    return r->arity < 0 ? r->starts[node] : node * r->arity;
}

/* The block of nodes from `first` on, of a level that ends at `end`. */
static struct block block_at(const struct run *r, int64_t first, int64_t end)
{
    const int64_t size = end - first < BLOCK ? end - first : BLOCK;
    const int64_t edge = first_child(r, first);
    const int64_t behind = first + size < r->inner ? first_child(r, first + size) : r->slots;
    return (struct block){first, size, edge, behind - edge};
}

/* The weights of forget gates in rows of their own, with any number of children. */
static const float *forget_weight(const struct run *r)
{
    return r->weight_hidden + 3 * r->width * r->width;
}

/* All leaves, then all levels above them. */
static void forward_run(const struct run *r)
{
    const struct nodes all = inner_nodes_of(r);
    const int threads = (int)r->threads;
    const int64_t width = r->width, ragged = r->arity < 0;
    memset(r->hidden, 0, width * sizeof *r->hidden);
    memset(r->memory, 0, width * sizeof *r->memory);
    if (r->packed_input)
        pack_transpose(r->weight_input, 3 * width, r->features, r->packed_input, threads);
    if (r->packed_hidden)
        pack_transpose(r->weight_hidden, columns(&all), ragged ? width : r->arity * width,
                       r->packed_hidden, threads);
    if (r->packed_forget)
        pack_transpose(forget_weight(r), width, width, r->packed_forget, threads);
    forward_leaves(r, threads);
    /* All children of a node share the bias of the forget gate. */
    memcpy(r->all_bias, r->bias, 3 * width * sizeof *r->bias);
    for (int64_t child = 0; child < r->arity; child++)
        memcpy(r->all_bias + (3 + child) * width, r->bias + 3 * width, width * sizeof *r->bias);
    int64_t first = 0, input = 0;
    for (int64_t level = 1; level < r->levels; level++) {
        const int64_t end = first + r->sizes[level];
        int64_t filled = r->filled[level];
        while (first < end) {
            const struct block b = block_at(r, first, end);
            const int64_t mine = filled < b.size ? filled : b.size;
            float *forget = ragged ? r->forget + (r->keeps ? b.edge * width : 0) : 0;
            const float *children = r->gathered + b.edge * width;
            gather(&all, b, threads);
            product(ragged ? r->sums + b.first * width : children, b.size,
                    ragged ? width : r->arity * width, r->weight_hidden, r->packed_hidden,
                    r->all_bias, columns(&all), r->products, threads);
            if (ragged)
                product(children, b.edges, width, forget_weight(r), r->packed_forget,
                        r->bias + 3 * width, width, forget, threads);
            const struct gates products = {r->products, forget};
            const struct gates gates = {r->gates + b.first * columns(&all), forget};
            const float *own = r->own ? r->own + input * 4 * width : 0;
            forward(&all, b, products, r->keeps ? gates : products, own, mine, threads);
            first += b.size;
            filled -= mine;
            input += mine;
        }
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

/* From the last level down to the leaves; every node has one parent at most. */
static void backward_run(const struct run *r)
{
    const struct nodes all = inner_nodes_of(r), leaves = leaves_of(r);
    const int threads = (int)r->threads;
    const int64_t width = r->width, ragged = r->arity < 0;
    const struct incoming *given = r->given, *of_cells = r->of_cells;
    struct incoming above = *given;
    above.place += r->leaves;
    if (above.outside_hidden)
        above.outside_hidden += r->leaves * above.outside_hidden_row;
    if (above.outside_memory)
        above.outside_memory += r->leaves * above.outside_memory_row;
    if (r->packed_hidden)
        pack_matrix(r->weight_hidden, columns(&all), ragged ? width : r->arity * width,
                    r->packed_hidden, threads);
    if (r->packed_forget)
        pack_matrix(forget_weight(r), width, width, r->packed_forget, threads);
    int64_t end = r->inner;
    for (int64_t level = r->levels - 1; level > 0; level--) {
        const int64_t start = end - r->sizes[level];
        for (int64_t first = start; first < end; first += BLOCK) {
            const struct block b = block_at(r, first, end);
            const int64_t row = b.first * columns(&all), child = b.edge * width;
            float *grads = r->grads + row, *to_hidden = r->to_hidden + child;
            float *to_forget = ragged ? r->to_forget + child : 0;
            const struct gates gates = {r->gates + row, ragged ? r->forget + child : 0};
            backward(&all, &above, b, gates, (struct gates){grads, to_forget}, r->to_memory + child,
                     threads);
            product_back(grads, b.size, columns(&all), r->weight_hidden, r->packed_hidden,
                         ragged ? width : r->arity * width, ragged ? r->to_sums : to_hidden,
                         threads);
            if (ragged) {
                product_back(to_forget, b.edges, width, forget_weight(r), r->packed_forget, width,
                             to_hidden, threads);
                add_sums(&all, b, r->to_sums, to_hidden);
            }
        }
        end = start;
    }
    if (r->leaf_of)
        sum_equal(given, r->leaf_of, r->leaves, width, (float *)of_cells->hidden,
                  (float *)of_cells->memory, threads);
    backward(&leaves, r->leaf_of ? of_cells : given, (struct block){0, r->cells, 0, 0},
             (struct gates){r->leaf_gates, 0}, (struct gates){r->leaf_grads, 0}, 0, threads);
}

#define JOINED(variant) variant##_kernels
#define NAMED(variant) JOINED(variant)
#define TEXT(variant) #variant
#define QUOTED(variant) TEXT(variant)

extern const struct kernels NAMED(VARIANT);
const struct kernels NAMED(VARIANT) = {
    QUOTED(VARIANT), gather,       forward,    backward,  sum_equal,
    forward_run,     backward_run, order_relu, histogram, pair_layers,
};
