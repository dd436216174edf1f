/* What the kernels of fused Tree-LSTMs are called with, and the table of their variants. */

#ifndef PYG_DYNBATCH_TREE_LSTM_H
#define PYG_DYNBATCH_TREE_LSTM_H

#include <stdint.h>

/* What all blocks of a pass share. Rows of nodes are counted by `first`, of children by `edge`.

   What products read and write is float32, or bfloat16 (the upper half of a float32) if `half`;
   such rows are `void *`. All others are float32. */
struct nodes {
    int64_t width;
    int64_t arity; /* Child places of a node; -1 for any number of children; 0 for leaves. */
    int64_t half;
    float *hidden, *memory;
    void *activated;
    uint16_t *half_hidden; /* h once more if `half`, as `all_hidden` holds it. */
    const float *dropout_mask;
    const float *bias, *forget_bias; /* What products of bfloat16 lack. */
    const int64_t *index, *starts;
    const void *all_hidden;  /* h of all nodes, to be read by `index`. */
    const float *all_memory; /* So is c. */
    void *gathered, *sums;
};

/* The gates of some nodes, or their gradients: one row per node, and with any number of children
   one row per child. */
struct gates {
    void *rows, *forget;
};

/* Consecutive nodes of one level, and their children. */
struct block {
    int64_t first, size; /* Nodes, counted among the leaves or among the inner nodes. */
    int64_t edge, edges; /* The first child, counted among those of all inner nodes; how many. */
};

/* The gradients of h and c of the nodes: what parents wrote, and what comes from outside. */
struct incoming {
    int64_t half, outside_hidden_row, outside_memory_row;
    const void *hidden; /* float32, or bfloat16 if `half` */
    const float *memory;
    const int64_t *place;
    const float *outside_hidden, *outside_memory;
};

/* A whole schedule. Leaves come first; they are level 0. Equal leaves are computed once. */
struct run {
    int64_t width, threads;
    int64_t arity; /* Child places of a node; -1 for any number of children. */
    int64_t levels, leaves, inner, slots; /* Counts; inner nodes, and child slots of these. */
    int64_t cells, inputs, features; /* Computed leaves, those with an input, width of an input. */
    int64_t keeps; /* Whether the gates of all blocks are kept for a backward pass. */
    const int64_t *sizes, *filled; /* Nodes of each level, and those with an input, first. */
    const int64_t *index, *starts; /* Of each child slot the row of the child; see first_child. */
    const int64_t *leaf_of;        /* The computed leaf of every leaf, or none if all are. */
    const float *rows;             /* Inputs, first those of leaves. */
    const float *own;              /* W x of the inner nodes with an input, or none. */
    const float *weight_input, *weight_hidden, *bias, *dropout_mask;
    float *hidden, *memory, *activated; /* Of all nodes, after a row for missing children. */
    float *leaf_hidden, *leaf_memory, *leaf_activated; /* Of computed leaves. */
    float *gathered, *sums; /* h of the children; with any number of them, their sum per node. */
    float *leaf_gates, *gates, *forget;
    float *all_bias; /* Room for the bias of the gates in the row of a node. */
    float *products; /* Room for those of a block, from which its gates are computed. */
    float *packed_input, *packed_hidden, *packed_forget; /* Room for panels of weights, or none. */
    /* The gradients of all nodes, and of the computed leaves if these are not all leaves. */
    const struct incoming *given, *of_cells;
    float *leaf_grads, *grads, *to_forget, *to_hidden, *to_memory, *to_sums;
};

/* Pairs that a weave module updates and the next one adds up, without rows of pairs in memory.
   `codes` is the number of rows of `own`: one per code, or one per pair without `code`. */
struct pair_layers {
    int64_t atoms, width, pairs, codes, threads;
    int64_t middle, inner, padded; /* Width of an updated row; it and the next in whole vectors. */
    const int32_t *begins, *code;  /* First atoms, then second ones; none: each has its own row. */
    const int64_t *starts;         /* The first pair of each thread. */
    const float *parts, *own, *weight, *next, *bias; /* [.., inner], and two [.., padded] */
    float *sums;                                     /* Result, [atom, padded]; zeros before. */
};

/* The functions of kernels.c, compiled for one kind of processor. */
struct kernels {
    const char *name;
    void (*gather)(const struct nodes *, struct block, int);
    void (*forward)(const struct nodes *, struct block, struct gates products, struct gates gates,
                    const void *own, int64_t filled, int);
    void (*backward)(const struct nodes *, const struct incoming *, struct block,
                     struct gates gates, struct gates grads, float *to_memory, int);
    void (*sum_equal)(const struct incoming *, const int64_t *cell, int64_t leaves, int64_t width,
                      float *hidden, float *memory, int);
    void (*forward_run)(const struct run *);
    void (*backward_run)(const struct run *);
    void (*order_relu)(const float *parts, int64_t width, const int32_t *first,
                       const int32_t *second, int64_t pairs, float *out, int);
    void (*histogram)(const float *x, const int64_t *set, int64_t rows, int64_t width,
                      const float *mean, const float *sharpness, float *out, int);
    void (*pair_layers)(const struct pair_layers *);
};

#endif
