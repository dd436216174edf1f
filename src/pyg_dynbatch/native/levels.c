/* The row numbers of a schedule over one tree or graph, as levels.py computes them with numpy; for
   valid graphs only. levels.py calls this. */

#include "arguments.h"
#include <string.h>

struct graph {
    int64_t nodes, edges, arity, examples; /* arity: -1 for any number of children */
    const int64_t *source, *target;        /* of each edge */
    const int64_t *slot, *depth;           /* of each edge and node, or none */
    const uint8_t *filled;                 /* whether a node has an input, or none: all have */
    const int64_t *example_sizes;
    int64_t by_target; /* whether slots are counted by target; by source, top-down */
    /* Results: for each position in level order the row of its input, or 0; for every child slot
       the row of the child; for nodes their rows and their examples; the nodes with an input. */
    int64_t *input_row, *children, *row, *example, *input_node;
    /* Without an arity: for every child its parent, counted in its level, and its edge; for every
       position its first child. */
    int64_t *segment, *edge_order, *child_start;
    int64_t *sizes, *inputs; /* of each level */
    int64_t *room;           /* nodes + edges + 2 numbers, in which each function counts */
};

/* Depth of every node by removing nodes without incoming edges; -1 if there is a cycle. `first` and
   `users` hold the targets of every node, `queue` all nodes in the end. */
static int64_t find_depth(const struct graph *g, int64_t *depth, int64_t *waiting, int64_t *queue)
{
    int64_t *first = g->room, *users = g->room + g->nodes + 2, done = 0, known = 0;
    memset(first, 0, (g->nodes + 2) * sizeof *first);
    memset(waiting, 0, g->nodes * sizeof *waiting);
    for (int64_t edge = 0; edge < g->edges; edge++) {
        first[g->source[edge] + 2]++;
        waiting[g->target[edge]]++;
    }
    for (int64_t node = 0; node < g->nodes; node++)
        first[node + 2] += first[node + 1];
    for (int64_t edge = 0; edge < g->edges; edge++)
        users[first[g->source[edge] + 1]++] = g->target[edge];
    for (int64_t node = 0; node < g->nodes; node++) {
        depth[node] = 0;
        if (!waiting[node])
            queue[known++] = node;
    }
    for (; done < known; done++) {
        const int64_t node = queue[done];
        for (int64_t user = first[node]; user < first[node + 1]; user++) {
            const int64_t parent = users[user];
            if (depth[parent] <= depth[node])
                depth[parent] = depth[node] + 1;
            if (!--waiting[parent])
                queue[known++] = parent;
        }
    }
    return known == g->nodes ? 0 : -1;
}

/* Sorts nodes by level, those with an input first; returns the number of levels, or -1. */
static int64_t sort_nodes(const struct graph *g, const int64_t *depth)
{
    int64_t deepest = -1, position = 0, numbered = 0, seen = 0;
    for (int64_t node = 0; node < g->nodes; node++)
        deepest = depth[node] > deepest ? depth[node] : deepest;
    if (deepest >= g->nodes)
        return -1; /* given depths with gaps */
    /* Nodes of every level with an input and without one; then where they begin; then, as each node
       takes the next row, where they end. */
    int64_t *of_level[2] = {g->sizes, g->inputs};
    memset(g->sizes, 0, g->nodes * sizeof *g->sizes);
    memset(g->inputs, 0, g->nodes * sizeof *g->inputs);
    for (int64_t node = 0; node < g->nodes; node++)
        of_level[g->filled && !g->filled[node]][depth[node]]++;
    for (int64_t level = 0; level <= deepest; level++) {
        const int64_t filled = g->sizes[level], others = g->inputs[level];
        if (filled + others == 0)
            return -1;
        g->sizes[level] = position;
        g->inputs[level] = position + filled;
        position += filled + others;
    }
    for (int64_t node = 0; node < g->nodes; node++)
        g->row[node] = 1 + of_level[g->filled && !g->filled[node]][depth[node]]++;
    const int64_t levels = deepest + 1;
    for (int64_t level = 0; level < levels; level++) {
        const int64_t filled = g->sizes[level] - numbered, size = g->inputs[level] - numbered;
        for (int64_t each = 0; each < size; each++)
            g->input_row[numbered + each] = each < filled ? ++seen : 0;
        numbered += size;
        g->sizes[level] = size;
        g->inputs[level] = filled;
    }
    for (int64_t node = 0; node < g->nodes; node++)
        if (g->input_row[g->row[node] - 1])
            g->input_node[g->input_row[g->row[node] - 1] - 1] = node;
    return levels;
}

/* The child slots of all nodes; -1 if a slot is taken twice or beyond the arity. */
static int64_t fill_slots(const struct graph *g)
{
    memset(g->children, 0, g->nodes * g->arity * sizeof *g->children);
    memset(g->room, 0, g->nodes * sizeof *g->room);
    for (int64_t edge = 0; edge < g->edges; edge++) {
        const int64_t owner = g->by_target ? g->target[edge] : g->source[edge];
        const int64_t slot = g->slot ? g->slot[edge] : g->room[owner]++;
        if (slot < 0 || slot >= g->arity)
            return -1;
        int64_t *child = g->children + (g->row[g->target[edge]] - 1) * g->arity + slot;
        if (*child)
            return -1;
        *child = g->row[g->source[edge]];
    }
    return 0;
}

/* The children of all nodes, one after the other; -1 if the slots of a node are not 0, 1, 2... */
static int64_t list_children(const struct graph *g, int64_t levels)
{
    int64_t *counts = g->room, begin = 0, position = 0;
    memset(counts, 0, g->nodes * sizeof *counts);
    for (int64_t edge = 0; edge < g->edges; edge++) {
        counts[g->row[g->target[edge]] - 1]++;
        g->edge_order[edge] = -1;
    }
    for (int64_t level = 0; level < levels; level++)
        for (int64_t node = 0; node < g->sizes[level]; node++, position++) {
            g->child_start[position] = begin;
            for (int64_t child = 0; child < counts[position]; child++)
                g->segment[begin++] = node;
            counts[position] = 0;
        }
    for (int64_t edge = 0; edge < g->edges; edge++) {
        const int64_t parent = g->row[g->target[edge]] - 1, next = parent + 1;
        const int64_t end = next < g->nodes ? g->child_start[next] : g->edges;
        const int64_t slot = g->slot ? g->slot[edge] : counts[parent]++;
        const int64_t start = g->child_start[parent];
        if (slot < 0 || slot >= end - start || g->edge_order[start + slot] >= 0)
            return -1;
        g->edge_order[start + slot] = edge;
        g->children[start + slot] = g->row[g->source[edge]];
    }
    return 0;
}

/* Returns the number of levels, or -1 if the graph is invalid or unusual; then `room[0]` tells
   whether every node is the source of one edge at most. */
static int64_t schedule_graph(const struct graph *g)
{
    int64_t levels, node = 0, *depth = g->input_row; /* overwritten at the end */
    for (int64_t edge = 0; edge < g->edges; edge++)
        if ((uint64_t)g->source[edge] >= (uint64_t)g->nodes ||
            (uint64_t)g->target[edge] >= (uint64_t)g->nodes)
            return -1;
    if (g->depth) {
        for (int64_t each = 0; each < g->nodes; each++)
            if (g->depth[each] < 0)
                return -1;
        for (int64_t edge = 0; edge < g->edges; edge++)
            if (g->depth[g->target[edge]] <= g->depth[g->source[edge]])
                return -1;
    } else if (find_depth(g, depth, g->row, g->example)) /* which are filled below */
        return -1;
    for (int64_t example = 0; example < g->examples; example++) {
        const int64_t size = g->example_sizes[example];
        if (size < 0 || size > g->nodes - node)
            return -1;
        for (int64_t end = node + size; node < end; node++)
            g->example[node] = example;
    }
    if (node < g->nodes)
        return -1;
    levels = sort_nodes(g, g->depth ? g->depth : depth);
    if (levels < 0 || (g->arity < 0 ? list_children(g, levels) : fill_slots(g)))
        return -1;
    memset(g->room, 0, (g->nodes + 1) * sizeof *g->room);
    for (int64_t edge = 0; edge < g->edges; edge++)
        g->room[1 + g->source[edge]]++;
    g->room[0] = 1;
    for (int64_t each = 1; each <= g->nodes; each++)
        g->room[0] &= g->room[each] <= 1;
    return levels;
}

static const struct field fields[] = {
    FIELD(graph, nodes), FIELD(graph, edges), FIELD(graph, arity), FIELD(graph, examples),
    FIELD(graph, source), FIELD(graph, target), FIELD(graph, slot), FIELD(graph, depth),
    FIELD(graph, filled), FIELD(graph, example_sizes), FIELD(graph, by_target),
    FIELD(graph, input_row), FIELD(graph, children), FIELD(graph, row), FIELD(graph, example),
    FIELD(graph, input_node), FIELD(graph, segment), FIELD(graph, edge_order),
    FIELD(graph, child_start), FIELD(graph, sizes), FIELD(graph, inputs), FIELD(graph, room),
};

static PyObject *schedule_levels(PyObject *module, PyObject *const *args, Py_ssize_t count,
                                 PyObject *names)
{
    struct graph g;
    if (read_fields(fields, COUNT(fields), args, count, names, &g))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    const int64_t levels = schedule_graph(&g);
    PyEval_RestoreThread(state);
    return PyLong_FromLongLong(levels);
}

PyMethodDef levels_functions[] = {
    {"schedule_levels", (PyCFunction)(void (*)(void))schedule_levels, METH_FASTCALL | METH_KEYWORDS,
     "Schedule a graph level by level; return the number of levels, or -1."},
    {NULL, NULL, 0, NULL},
};
