/* The levels of trees or graphs, for valid graphs only: core/levels.py holds the definition. */

#include "arguments.h"
#include <stdlib.h>
#include <string.h>

struct levels {
    int64_t nodes, edges, arity, examples; /* arity: -1 for any number of children */
    const int64_t *source, *target;        /* of each edge */
    const int64_t *slot;                   /* of each edge, or none */
    const uint8_t *filled;                 /* whether a node has an input; or none: all have */
    const int64_t *example_sizes;
    int64_t by_target; /* whether slots are counted by target; by source, top-down */
    int64_t *index;    /* result: the vectors below, one after another */
    int64_t *levels;   /* result: for each level its nodes, inputs and children; 3 per node */
    int64_t *room;     /* 3 * nodes + edges + 2 numbers: in the last `nodes`, the depths; in the
                          others, each function counts */
    /* For every child slot the row of the child; without an arity, for every child its parent,
       counted in its level, for every position in level order its first child, for every child its
       edge; for nodes their rows; the nodes with an input. */
    int64_t *children, *segment, *child_start, *edge_order, *row, *input_node;
};

static void find_places(struct levels *g)
{
    const int64_t ragged = g->arity < 0;
    g->children = g->index;
    g->segment = g->children + (ragged ? g->edges : g->nodes * g->arity);
    g->child_start = g->segment + ragged * g->edges;
    g->edge_order = g->child_start + ragged * g->nodes;
    g->row = g->edge_order + ragged * g->edges;
    g->input_node = g->row + g->nodes;
}

/* Depth of every node by removing nodes without incoming edges; -1 if there is a cycle. `first` and
   `users` hold the targets of every node, `queue` all nodes in the end. */
static int64_t find_depth(const struct levels *g, int64_t *depth)
{
    int64_t *first = g->room, *users = first + g->nodes + 2, *queue = users + g->edges;
    int64_t *waiting = g->row, done = 0, known = 0; /* the rows are filled in later */
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

/* Sorts nodes by level, those with an input first; returns the number of levels. */
static int64_t sort_nodes(const struct levels *g, const int64_t *depth)
{
    int64_t levels = 0, position = 0, missing = 0;
    /* Nodes of every level with an input and without one; then where they begin; then, as each node
       takes the next row, where they end. */
    int64_t *of_level[2] = {g->room, g->room + g->nodes};
    memset(g->room, 0, 2 * g->nodes * sizeof *g->room);

    for (int64_t node = 0; node < g->nodes; node++) {
        levels = depth[node] >= levels ? depth[node] + 1 : levels;
        of_level[g->filled && !g->filled[node]][depth[node]]++;
    }

    for (int64_t level = 0; level < levels; level++) {
        const int64_t filled = of_level[0][level], others = of_level[1][level];
        of_level[0][level] = position;
        of_level[1][level] = position + filled;
        position += filled + others;
        g->levels[3 * level] = filled + others;
        g->levels[3 * level + 1] = filled;
        g->levels[3 * level + 2] = (filled + others) * (g->arity < 0 ? 0 : g->arity);
    }
    for (int64_t node = 0; node < g->nodes; node++)
        g->row[node] = 1 + of_level[g->filled && !g->filled[node]][depth[node]]++;

    /* From here on, the nodes of earlier levels without an input. */
    for (int64_t level = 0; level < levels; level++) {
        of_level[0][level] = missing;
        missing += g->levels[3 * level] - g->levels[3 * level + 1];
    }
    for (int64_t node = 0; node < g->nodes; node++)
        if (!g->filled || g->filled[node])
            g->input_node[g->row[node] - 1 - of_level[0][depth[node]]] = node;
    return levels;
}

/* The child slots of all nodes; -1 if a slot is taken twice or beyond the arity. */
static int64_t fill_slots(const struct levels *g)
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

struct place {
    int64_t slot, edge;
};

static int by_slot(const void *one, const void *other)
{
    const struct place *a = one, *b = other;
    if (a->slot != b->slot)
        return a->slot < b->slot ? -1 : 1;
    return a->edge < b->edge ? -1 : a->edge > b->edge;
}

/* Sorts the edges of every node by slot; -1 without memory. */
static int64_t sort_edges(const struct levels *g)
{
    struct place *places = malloc((g->edges + 1) * sizeof *places);
    if (!places)
        return -1;
    for (int64_t each = 0; each < g->edges; each++)
        places[each] = (struct place){g->slot[g->edge_order[each]], g->edge_order[each]};
    for (int64_t position = 0; position < g->nodes; position++) {
        const int64_t next = position + 1, first = g->child_start[position];
        const int64_t end = next < g->nodes ? g->child_start[next] : g->edges;
        int64_t sorted = first;
        while (sorted + 1 < end && by_slot(places + sorted, places + sorted + 1) < 0)
            sorted++;
        if (sorted + 1 < end)
            qsort(places + first, end - first, sizeof *places, by_slot);
    }
    for (int64_t each = 0; each < g->edges; each++)
        g->edge_order[each] = places[each].edge;
    free(places);
    return 0;
}

/* The children of all nodes, one after the other; -1 without memory. */
static int64_t list_children(const struct levels *g, int64_t levels)
{
    int64_t *counts = g->room, begin = 0, position = 0;
    memset(counts, 0, g->nodes * sizeof *counts);

    for (int64_t edge = 0; edge < g->edges; edge++)
        counts[g->row[g->target[edge]] - 1]++;
    for (int64_t level = 0; level < levels; level++) {
        const int64_t first = begin;
        for (int64_t node = 0; node < g->levels[3 * level]; node++, position++) {
            g->child_start[position] = begin;
            for (int64_t child = 0; child < counts[position]; child++)
                g->segment[begin++] = node;
            counts[position] = 0;
        }
        g->levels[3 * level + 2] = begin - first;
    }

    for (int64_t edge = 0; edge < g->edges; edge++) {
        const int64_t parent = g->row[g->target[edge]] - 1;
        g->edge_order[g->child_start[parent] + counts[parent]++] = edge;
    }
    if (g->slot && sort_edges(g))
        return -1;
    for (int64_t each = 0; each < g->edges; each++)
        g->children[each] = g->row[g->source[g->edge_order[each]]];
    return 0;
}

/* Returns the number of levels, INVALID, or -1 without memory; then `room[0]` tells whether
   every node is the source of one edge at most. */
static int64_t levels(struct levels *g)
{
    int64_t levels, nodes = 0, *depth = g->room + 2 * g->nodes + g->edges + 2;
    find_places(g);

    for (int64_t edge = 0; edge < g->edges; edge++)
        if ((uint64_t)g->source[edge] >= (uint64_t)g->nodes ||
            (uint64_t)g->target[edge] >= (uint64_t)g->nodes || (g->slot && g->slot[edge] < 0))
            return INVALID;
    if (find_depth(g, depth))
        return INVALID;

    for (int64_t example = 0; example < g->examples; example++) {
        const int64_t size = g->example_sizes[example];
        if (size < 0 || size > g->nodes - nodes)
            return INVALID;
        nodes += size;
    }
    if (nodes < g->nodes)
        return INVALID;

    levels = sort_nodes(g, depth);
    if (g->arity < 0 ? list_children(g, levels) : fill_slots(g))
        return g->arity < 0 ? -1 : INVALID;

    /* The edges of each source, after a place for what the caller reads. */
    memset(g->room, 0, (g->nodes + 1) * sizeof *g->room);
    for (int64_t edge = 0; edge < g->edges; edge++)
        g->room[1 + g->source[edge]]++;
    g->room[0] = 1;
    for (int64_t each = 1; each <= g->nodes; each++)
        g->room[0] &= g->room[each] <= 1;
    return levels;
}

static const struct field fields_of_levels[] = {
    FIELD(levels, nodes),     FIELD(levels, edges),  FIELD(levels, arity),
    FIELD(levels, examples),  FIELD(levels, source), FIELD(levels, target),
    FIELD(levels, slot),      FIELD(levels, filled), FIELD(levels, example_sizes),
    FIELD(levels, by_target), FIELD(levels, index),  FIELD(levels, levels),
    FIELD(levels, room),
};

FUNCTION(levels)

PyMethodDef levels_functions[] = {
    METHOD(levels, "Schedule a graph level by level; return the number of levels, or -2."),
    {NULL, NULL, 0, NULL},
};
