/* The steps of recorded calls. core/definitions.py says what these functions compute; they trust
   their arguments. */

#include "arena.h"
#include "graph.h"
#include "recordings.h"
#include <string.h>

/* Assigns calls to steps. Kinds of calls that depend on each other form a group, and groups run one
   after the other; within a group, calls go by depth, or by the agenda where that is as short. */
struct order {
    int64_t calls, kinds, agenda;
    const int32_t *kind;       /* of each call; numbered without gaps before anything else */
    const int32_t *row, *call; /* of each value, as `merge` leaves them */
    const int32_t *first_read, *read;
    int32_t *step; /* result: of each call */
    /* Room. */
    struct arena arena;
    struct graph graph;                 /* of the calls */
    int32_t *group, *depth, *sorted;    /* of each call; all calls by group, then by depth */
    int32_t *waiting, *next, *by_depth; /* of each call: reads, the next that is ready, its step */
    int32_t *first_user, *user;         /* the calls of its group that read the results of a call */
    int32_t *group_of_kind;
    int32_t *kinds_at_depth, *step_of_kind; /* by depth: the sorted kinds of one, and their steps */
    int32_t *ready, *left; /* by the agenda: of each kind, its first ready call, its calls left */
    double *depth_left;    /* and the sum of their depths */
};

/* Sorts calls by group, then by depth. */
static int sort_calls(struct order *o, int32_t groups)
{
    /* The levels of all groups are numbered in a row: `level` has the first one of each group, and
       `first` the place of the first call of each level in `sorted`. */
    int32_t *const level = new_array(&o->arena, groups + 1, sizeof *level);
    int32_t *const first = new_array(&o->arena, o->calls + 1, sizeof *first);
    if (o->arena.is_exhausted)
        return -1;

    for (int64_t call = 0; call < o->calls; call++) {
        const int32_t group = o->group_of_kind[o->graph.kind[call]];
        o->group[call] = group;
        if (o->depth[call] >= level[group + 1])
            level[group + 1] = o->depth[call] + 1;
    }
    for (int32_t group = 0; group < groups; group++)
        level[group + 1] += level[group];

    for (int64_t call = 0; call < o->calls; call++)
        first[level[o->group[call]] + o->depth[call] + 1]++;
    for (int32_t each = 0; each < level[groups]; each++)
        first[each + 1] += first[each];

    for (int64_t call = 0; call < o->calls; call++)
        o->sorted[first[level[o->group[call]] + o->depth[call]]++] = (int32_t)call;
    return 0;
}

/* Steps of sorted calls from `first` to `last`, one per depth and kind; returns the next step. */
static int32_t go_by_depth(struct order *o, int64_t first, int64_t last, int32_t step)
{
    for (int64_t end; first < last; first = end) {
        int64_t kinds = 0;
        const int32_t depth = o->depth[o->sorted[first]];
        for (end = first; end < last && o->depth[o->sorted[end]] == depth; end++)
            o->step_of_kind[o->graph.kind[o->sorted[end]]] = -1;

        for (int64_t each = first; each < end; each++) {
            const int32_t kind = o->graph.kind[o->sorted[each]];
            int64_t place = kinds;
            if (o->step_of_kind[kind] != -1)
                continue;
            o->step_of_kind[kind] = 0; /* it is listed */
            for (; place > 0 && o->kinds_at_depth[place - 1] > kind; place--)
                o->kinds_at_depth[place] = o->kinds_at_depth[place - 1];
            o->kinds_at_depth[place] = kind;
            kinds++;
        }

        for (int64_t each = 0; each < kinds; each++)
            o->step_of_kind[o->kinds_at_depth[each]] = step++;
        for (int64_t each = first; each < end; each++)
            o->by_depth[o->sorted[each]] = o->step_of_kind[o->graph.kind[o->sorted[each]]];
    }
    return step;
}

/* Like `go_by_depth`, but each step takes all ready calls of the kind whose remaining calls are
   shallowest on average. */
static int32_t go_by_agenda(struct order *o, int64_t first, int64_t last, int32_t step)
{
    for (int64_t kind = 0; kind < o->graph.kinds; kind++) {
        o->ready[kind] = -1;
        o->left[kind] = 0;
        o->depth_left[kind] = 0;
    }
    for (int64_t each = first; each < last; each++) {
        const int32_t call = o->sorted[each], kind = o->graph.kind[call];
        o->left[kind]++;
        o->depth_left[kind] += o->depth[call];
        if (!o->waiting[call]) {
            o->next[call] = o->ready[kind];
            o->ready[kind] = call;
        }
    }

    for (int64_t left = last - first; left > 0; step++) {
        int64_t best = -1;
        double shallowest = 0;
        for (int64_t kind = 0; kind < o->graph.kinds; kind++)
            if (o->ready[kind] >= 0) {
                const double mean = o->depth_left[kind] / o->left[kind];
                if (best < 0 || mean < shallowest) {
                    best = kind;
                    shallowest = mean;
                }
            }

        int32_t call = o->ready[best];
        o->ready[best] = -1;
        for (int32_t next; call >= 0; call = next, left--) {
            next = o->next[call];
            o->step[call] = step;
            o->left[best]--;
            o->depth_left[best] -= o->depth[call];
            for (int32_t each = o->first_user[call]; each < o->first_user[call + 1]; each++) {
                const int32_t user = o->user[each], kind = o->graph.kind[user];
                if (!--o->waiting[user]) {
                    o->next[user] = o->ready[kind];
                    o->ready[kind] = user;
                }
            }
        }
    }
    return step;
}

/* Lists the calls of the same group that read the results of each call. The first pass counts them,
   the second lists them: meanwhile those of a call go from `first_user[call + 1]` on. */
static int list_users(struct order *o)
{
    o->first_user = new_array(&o->arena, o->calls + 2, sizeof *o->first_user);
    o->user = new_array(&o->arena, o->first_read[o->calls], sizeof *o->user);
    if (o->arena.is_exhausted)
        return -1;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t call = 0; call < o->calls; call++) {
            o->waiting[call] = 0;
            for (int32_t read = o->first_read[call]; read < o->first_read[call + 1]; read++) {
                const int32_t maker = maker_of(&o->graph, o->read[read]);
                if (maker < 0 || o->group[maker] != o->group[call])
                    continue;
                o->waiting[call]++;
                if (pass)
                    o->user[o->first_user[maker + 1]++] = (int32_t)call;
                else
                    o->first_user[maker + 2]++;
            }
        }
        for (int64_t call = 0; !pass && call < o->calls; call++)
            o->first_user[call + 2] += o->first_user[call + 1];
    }
    return 0;
}

/* Numbers the kinds that are called without gaps; -1 without memory. */
static int number_kinds(struct order *o)
{
    int32_t *const number = new_array(&o->arena, o->kinds, sizeof *number);
    int32_t *const kind = new_array(&o->arena, o->calls, sizeof *kind), kinds = 0;
    if (o->arena.is_exhausted)
        return -1;
    for (int64_t call = 0; call < o->calls; call++)
        number[o->kind[call]] = 1;
    for (int64_t each = 0; each < o->kinds; each++)
        number[each] = number[each] ? kinds++ : -1;
    for (int64_t call = 0; call < o->calls; call++)
        kind[call] = number[o->kind[call]];
    o->graph = (struct graph){.calls = o->calls,
                              .kinds = kinds,
                              .kind = kind,
                              .row = o->row,
                              .call = o->call,
                              .first_read = o->first_read,
                              .read = o->read};
    return 0;
}

/* Makes room; -1 without memory. */
static int make_room(struct order *o)
{
    int32_t **const of_calls[] = {&o->group,   &o->depth, &o->sorted,
                                  &o->waiting, &o->next,  &o->by_depth};
    int32_t **const of_kinds[] = {&o->group_of_kind, &o->kinds_at_depth, &o->step_of_kind,
                                  &o->ready, &o->left};
    for (int each = 0; each < COUNT(of_calls); each++)
        *of_calls[each] = new_array(&o->arena, o->calls, sizeof(int32_t));
    for (int each = 0; each < COUNT(of_kinds); each++)
        *of_kinds[each] = new_array(&o->arena, o->graph.kinds, sizeof(int32_t));
    o->depth_left = new_array(&o->arena, o->graph.kinds, sizeof *o->depth_left);
    return o->arena.is_exhausted ? -1 : 0;
}

/* Orders the groups one after another; returns the number of steps. */
static int32_t order_groups(struct order *o)
{
    int32_t steps = 0;
    for (int64_t start = 0, end; start < o->calls; start = end) {
        const int32_t group = o->group[o->sorted[start]], before = steps;
        for (end = start; end < o->calls && o->group[o->sorted[end]] == group;)
            end++;
        steps = go_by_depth(o, start, end, before);
        if (o->agenda) {
            const int32_t by_agenda = go_by_agenda(o, start, end, before);
            if (by_agenda <= steps) {
                steps = by_agenda;
                continue;
            }
        }
        for (int64_t each = start; each < end; each++)
            o->step[o->sorted[each]] = o->by_depth[o->sorted[each]];
    }
    return steps;
}

/* Returns the number of steps, or -1 without memory. */
static int64_t order(struct order *o)
{
    int64_t steps = -1;
    o->arena = (struct arena){0};
    if (!number_kinds(o) && !make_room(o)) {
        const int64_t groups = find_groups(&o->graph, o->group_of_kind);
        find_levels(&o->graph, o->group_of_kind, o->depth);
        if (groups >= 0 && !sort_calls(o, (int32_t)groups) && (!o->agenda || !list_users(o)))
            steps = order_groups(o);
    }
    free_arena(&o->arena);
    return steps;
}

/* What is written of each step; its results are as many as those of the call with the most. */
enum { STEP_KIND, STEP_SIZE, STEP_RESULTS };

/* What is written of each slice of the index, which one argument of a step reads. */
enum {
    SLICE_BEGIN, /* in the index */
    SLICE_LENGTH,
    SLICE_FIRST_ROW, /* -1 if the rows are not contiguous; before, where the next row is written */
    SLICE_CALLS,     /* of ragged arguments: where the call of each row is in the index; else -1 */
    SLICE_FIELDS,
};

/* Gives the results of every step rows, and lists the rows that it reads. */
struct place {
    const struct sites *sites;
    const int32_t *code;
    int64_t calls, steps, num_signatures, most_outputs;
    const int32_t *first_read, *read, *step;
    const int32_t *kind, *first_member, *member, *first_chain, *chain; /* as `fuse` leaves them */
    int32_t *row;    /* of each value; result: also those of results */
    int64_t *free;   /* the first free row of each row type; result: after all results */
    int64_t *index;  /* result: row numbers, argument by argument */
    int64_t *call;   /* result: of each step its kind, its size, and the first row of each result */
    int64_t *slices; /* result: of each argument of each step, `SLICE_FIELDS` numbers */
    /* Room. */
    int64_t width;              /* numbers of `call` per step */
    int32_t *position, *one_of; /* of each call, within its step; one call of each step */
    int64_t *first_slice;       /* of each step */
    uint8_t *has_ragged;        /* of each step, whether an argument is ragged */
};

/* The first of rows that are contiguous, 0 if there are none, or -1. */
static int64_t first_row(const int64_t *rows, int64_t count)
{
    for (int64_t each = 1; each < count; each++)
        if (rows[each] != rows[0] + each)
            return -1;
    return count ? rows[0] : 0;
}

/* An argument that a call reads from other steps. A call that is not fused has one node, its
   record; a fused one has a node per member, and a chain (see `write_chain` of fuse.c) that says
   for each argument what it refers to inside of the step, or -1 if it is read from others. */
struct piece {
    int32_t node, argument, values; /* the node, its argument, and the number of values of it */
    int is_ragged;
    const int32_t *next;  /* the values, in the code */
    const int32_t *refer; /* what the arguments of the node refer to, in the chain; or NULL */
};

/* Goes to the next argument, from `node` -1 to the first one; returns 0 behind the last one. */
static int next_piece(const struct place *p, int32_t call, struct piece *piece)
{
    const struct sites *s = p->sites;
    const int32_t *const members = p->member + p->first_member[call];
    const int32_t nodes = p->first_member[call + 1] - p->first_member[call];
    if (piece->node < 0) {
        const int32_t fused = p->kind[call] - (int32_t)p->num_signatures;
        /* Behind the numbers of nodes and outputs, and the signature of the first node. */
        *piece = (struct piece){.refer = fused < 0 ? NULL : p->chain + p->first_chain[fused] + 3,
                                .next = p->code + *members + 1,
                                .argument = -1};
    } else
        piece->next += piece->values;

    for (;;) {
        const int32_t signature = s->signature[p->code[members[piece->node]]];
        if (++piece->argument == s->arguments[signature]) {
            if (++piece->node == nodes)
                return 0;
            piece->argument = -1;
            piece->next = p->code + members[piece->node] + 1;
            if (piece->refer) /* behind the signature of the next node, too */
                piece->refer += s->arguments[signature] + 1;
            continue;
        }
        piece->is_ragged = is_ragged(s, signature, piece->argument);
        piece->values = values_of(s, signature, piece->argument, &piece->next);
        if (!piece->refer || piece->refer[piece->argument] < 0)
            return 1;
        piece->next += piece->values;
    }
}

/* Returns which node of a call makes an output, or -1 behind the last one; `result` says which of
   its results it is. */
static int32_t output_of(const struct place *p, int32_t call, int32_t number, int32_t *result)
{
    const int32_t fused = p->kind[call] - (int32_t)p->num_signatures;
    const int32_t begin = p->member[p->first_member[call]];
    *result = number;
    if (fused < 0)
        return number < p->sites->results[p->code[begin]] ? 0 : -1;

    const int32_t *next = p->chain + p->first_chain[fused];
    const int32_t nodes = next[0], outputs = next[1];
    if (number >= outputs)
        return -1;
    next += 2;
    for (int32_t node = 0; node < nodes; node++)
        next += 1 + p->sites->arguments[*next];
    *result = next[2 * number + 1];
    return next[2 * number];
}

/* Writes the steps, the rows of their results, and the lengths of what they read; returns the
   number of slices. */
static int64_t place_results(struct place *p)
{
    const struct sites *s = p->sites;
    int64_t slices = 0;
    int32_t node, result;
    memset(p->call, 0, p->steps * p->width * sizeof *p->call);
    for (int32_t call = 0; call < p->calls; call++) {
        int64_t *const step = p->call + p->step[call] * p->width;
        p->one_of[p->step[call]] = call;
        step[STEP_KIND] = p->kind[call];
        p->position[call] = (int32_t)step[STEP_SIZE]++;
    }

    for (int64_t each = 0; each < p->steps; each++) {
        int64_t *const step = p->call + each * p->width;
        const int32_t call = p->one_of[each], *const members = p->member + p->first_member[call];
        for (int32_t out = 0; (node = output_of(p, call, out, &result)) >= 0; out++) {
            const int32_t site = p->code[members[node]];
            int64_t *const free_row = p->free + s->type[site * s->most_results + result];
            step[STEP_RESULTS + out] = *free_row;
            *free_row += step[STEP_SIZE];
        }
        p->first_slice[each] = slices;
        for (struct piece piece = {.node = -1}; next_piece(p, call, &piece);) {
            int64_t *const slice = p->slices + SLICE_FIELDS * slices++;
            p->has_ragged[each] |= piece.is_ragged;
            slice[SLICE_LENGTH] = piece.is_ragged ? 0 : step[STEP_SIZE]; /* ragged: see below */
        }
    }
    p->first_slice[p->steps] = slices;

    for (int32_t call = 0; call < p->calls; call++) {
        const int64_t *const step = p->call + p->step[call] * p->width;
        const int32_t *const members = p->member + p->first_member[call];
        for (int32_t out = 0; (node = output_of(p, call, out, &result)) >= 0; out++)
            p->row[members[node] + result] = (int32_t)step[STEP_RESULTS + out] + p->position[call];
        if (!p->has_ragged[p->step[call]])
            continue;
        int64_t *slice = p->slices + SLICE_FIELDS * p->first_slice[p->step[call]];
        for (struct piece piece = {.node = -1}; next_piece(p, call, &piece); slice += SLICE_FIELDS)
            if (piece.is_ragged)
                slice[SLICE_LENGTH] += piece.values;
    }
    return slices;
}

/* Gives each slice its part of the index. */
static void divide_index(struct place *p)
{
    int64_t entry = 0, *slice = p->slices;
    for (int64_t step = 0; step < p->steps; step++)
        for (struct piece piece = {.node = -1}; next_piece(p, p->one_of[step], &piece);
             slice += SLICE_FIELDS) {
            slice[SLICE_BEGIN] = entry;
            slice[SLICE_FIRST_ROW] = entry;
            entry += slice[SLICE_LENGTH];
            slice[SLICE_CALLS] = piece.is_ragged ? entry : -1;
            entry += piece.is_ragged ? slice[SLICE_LENGTH] : 0;
        }
}

/* Writes the rows that one call reads. */
static void place_reads(struct place *p, int32_t call)
{
    const int32_t step = p->step[call], *const read = p->read + p->first_read[call];
    const int64_t first = p->first_slice[step], count = p->first_slice[step + 1] - first;
    int64_t *slice = p->slices + SLICE_FIELDS * first;
    for (int64_t each = 0; each < count; each++, slice += SLICE_FIELDS)
        p->index[slice[SLICE_FIRST_ROW]++] = p->row[read[each]];
}

/* The same for a call with ragged arguments. */
static void place_ragged_reads(struct place *p, int32_t call)
{
    const int32_t *read = p->read + p->first_read[call];
    int64_t *slice = p->slices + SLICE_FIELDS * p->first_slice[p->step[call]];
    for (struct piece piece = {.node = -1}; next_piece(p, call, &piece); slice += SLICE_FIELDS)
        for (int32_t each = 0; each < piece.values; each++) {
            const int64_t next = slice[SLICE_FIRST_ROW]++;
            if (slice[SLICE_CALLS] >= 0)
                p->index[slice[SLICE_CALLS] + next - slice[SLICE_BEGIN]] = p->position[call];
            p->index[next] = p->row[*read++];
        }
}

/* Returns the number of slices, or -1 without memory. */
static int64_t place(struct place *p)
{
    struct arena arena = {0};
    int64_t slices = -1;
    p->width = STEP_RESULTS + p->most_outputs;
    p->first_slice = new_array(&arena, p->steps + 1, sizeof *p->first_slice);
    p->position = new_array(&arena, p->calls, sizeof *p->position);
    p->one_of = new_array(&arena, p->steps, sizeof *p->one_of);
    p->has_ragged = new_array(&arena, p->steps, sizeof *p->has_ragged);
    if (!arena.is_exhausted) {
        slices = place_results(p);
        divide_index(p);
        for (int32_t call = 0; call < p->calls; call++)
            if (p->has_ragged[p->step[call]])
                place_ragged_reads(p, call);
            else
                place_reads(p, call);
        for (int64_t slice = 0; slice < slices; slice++) {
            int64_t *const own = p->slices + SLICE_FIELDS * slice;
            own[SLICE_FIRST_ROW] = first_row(p->index + own[SLICE_BEGIN], own[SLICE_LENGTH]);
        }
    }
    free_arena(&arena);
    return slices;
}

static const struct field fields_of_order[] = {
    FIELD(order, calls),      FIELD(order, kinds), FIELD(order, agenda),
    FIELD(order, kind),       FIELD(order, row),   FIELD(order, call),
    FIELD(order, first_read), FIELD(order, read),  FIELD(order, step),
};
static const struct field fields_of_place[] = {
    FIELD(place, sites),       FIELD(place, code),           FIELD(place, calls),
    FIELD(place, steps),       FIELD(place, num_signatures), FIELD(place, most_outputs),
    FIELD(place, first_read),  FIELD(place, read),           FIELD(place, step),
    FIELD(place, kind),        FIELD(place, first_member),   FIELD(place, member),
    FIELD(place, first_chain), FIELD(place, chain),          FIELD(place, row),
    FIELD(place, free),        FIELD(place, index),          FIELD(place, call),
    FIELD(place, slices),
};

FUNCTION(order)
FUNCTION(place)

PyMethodDef steps_functions[] = {
    METHOD(order, "Assign calls to steps; return the number of steps."),
    METHOD(place, "List the rows that steps read and write; return the number of slices."),
    {NULL, NULL, 0, NULL},
};
