/* Which calls read the results of which, and what that says of kinds of calls.

   Calls are numbered so that each reads those before it only. Of three calls whose kinds are 0, 1
   and 1, if the second reads the first and the third the second, kind 1 depends on kind 0 and on
   itself: there are two groups, {0} and {1}, and the levels of the calls are 0, 0 and 1. */

#ifndef PYG_DYNBATCH_GRAPH_H
#define PYG_DYNBATCH_GRAPH_H

#include "arguments.h"

struct graph {
    int64_t calls, kinds;
    const int32_t *kind;              /* of each call */
    const int32_t *row, *call;        /* of each value, as `merge` leaves them */
    const int32_t *first_read, *read; /* the values that each call reads */
};

/* The call that makes a value, or -1 if it has a row. */
static inline int32_t maker_of(const struct graph *g, int32_t value)
{
    return g->row[value] >= 0 ? -1 : g->call[value];
}

/* Numbers the groups of kinds that depend on each other, in topological order; returns how many
   there are, or -1 without memory. */
int64_t find_groups(const struct graph *g, int32_t *group_of_kind);

/* Finds the level of each call: how many others of its group it waits for, one after another. */
void find_levels(const struct graph *g, const int32_t *group_of_kind, int32_t *level);

#endif
