/* The steps of recorded calls. core/definitions.py says what these functions compute; they trust
   their arguments. */

#include "recordings.h"
#include <stdlib.h>
#include <string.h>

/* Assigns calls to steps. Kinds of calls that depend on each other form a group, and groups run one
   after the other; within a group, calls go by depth, or by the agenda where that is as short. */
struct order {
    int64_t calls, kinds, agenda;
    const int32_t *kind;       /* of each call; numbered without gaps before anything else */
    const int32_t *row, *call; /* of each value, as `merge` leaves them */
    const int32_t *first_read, *read;
    int32_t *step; /* result: of each call */
    /* Room: numbers of the kinds that are called; of each call; of each kind; the calls that read a result; and by_depth's steps. */
    int32_t *group, *depth, *sorted, *waiting, *next, *first_user, *user, *other;
    int32_t *group_of_kind, *ready, *number, *left;
    double *depth_left;
    uint64_t *reach; /* kinds * `words`: which kinds depend on which */
    int64_t words;
};

/* The call that makes the value of a read, or -1. */
static int32_t source_of(const struct order *o, int64_t read)
{
    const int32_t value = o->read[read];
    return o->row[value] >= 0 ? -1 : o->call[value];
}

static int reaches(const struct order *o, int64_t from, int64_t to)
{
    return o->reach[from * o->words + to / 64] >> to % 64 & 1;
}

/* Finds which kinds depend on which, not counting that each depends on itself. */
static void find_reach(struct order *o)
{
    for (int64_t call = 0; call < o->calls; call++)
        for (int64_t read = o->first_read[call]; read < o->first_read[call + 1]; read++) {
            const int32_t source = source_of(o, read), kind = o->kind[call];
            if (source >= 0)
                o->reach[o->kind[source] * o->words + kind / 64] |= (uint64_t)1 << kind % 64;
        }
    for (int64_t middle = 0; middle < o->kinds; middle++)
        for (int64_t from = 0; from < o->kinds; from++)
            if (reaches(o, from, middle))
                for (int64_t word = 0; word < o->words; word++)
                    o->reach[from * o->words + word] |= o->reach[middle * o->words + word];
}

/* Numbers the groups in topological order; returns how many there are. */
static int32_t find_groups(struct order *o)
{
    int32_t *ancestors = o->number, *leader = o->left, groups = 0;
    find_reach(o);
    for (int64_t kind = 0; kind < o->kinds; kind++)
        o->reach[kind * o->words + kind / 64] |= (uint64_t)1 << kind % 64;
    for (int64_t kind = 0; kind < o->kinds; kind++) {
        ancestors[kind] = 0;
        leader[kind] = (int32_t)kind;
        o->group_of_kind[kind] = -1;
        for (int64_t from = o->kinds - 1; from >= 0; from--)
            if (reaches(o, from, kind)) {
                ancestors[kind] += from != kind;
                if (from < leader[kind] && reaches(o, kind, from))
                    leader[kind] = (int32_t)from;
            }
    }
    /* A group comes after those that reach it: fewer ancestors first, then by number. */
    for (;; groups++) {
        int64_t best = -1;
        for (int64_t kind = 0; kind < o->kinds; kind++)
            if (o->group_of_kind[kind] < 0 && leader[kind] == kind &&
                (best < 0 || ancestors[kind] < ancestors[best]))
                best = kind;
        if (best < 0)
            return groups;
        for (int64_t kind = 0; kind < o->kinds; kind++)
            if (leader[kind] == best)
                o->group_of_kind[kind] = groups;
    }
}

/* Finds the depth of every call within its group; sorts calls by group, then by depth. `first` and
   `level` have room for a number per call and group, and one more. */
static void sort_calls(struct order *o, int32_t groups, int32_t *first, int32_t *level)
{
    memset(level, 0, (groups + 1) * sizeof *level);
    for (int64_t call = 0; call < o->calls; call++) {
        const int32_t group = o->group[call] = o->group_of_kind[o->kind[call]];
        int32_t depth = 0;
        for (int64_t read = o->first_read[call]; read < o->first_read[call + 1]; read++) {
            const int32_t source = source_of(o, read);
            if (source >= 0 && o->group[source] == group && o->depth[source] >= depth)
                depth = o->depth[source] + 1;
        }
        o->depth[call] = depth;
        if (depth >= level[group + 1])
            level[group + 1] = depth + 1;
    }
    for (int32_t group = 0; group < groups; group++)
        level[group + 1] += level[group];
    memset(first, 0, (level[groups] + 1) * sizeof *first);
    for (int64_t call = 0; call < o->calls; call++)
        first[level[o->group[call]] + o->depth[call] + 1]++;
    for (int32_t each = 0; each < level[groups]; each++)
        first[each + 1] += first[each];
    for (int64_t call = 0; call < o->calls; call++)
        o->sorted[first[level[o->group[call]] + o->depth[call]]++] = (int32_t)call;
}

/* Steps of sorted calls from `first` to `last`, one per depth and kind; returns the next step. */
static int32_t go_by_depth(struct order *o, int64_t first, int64_t last, int32_t step)
{
    for (int64_t end; first < last; first = end) {
        int64_t kinds = 0;
        const int32_t depth = o->depth[o->sorted[first]];
        for (end = first; end < last && o->depth[o->sorted[end]] == depth; end++)
            o->number[o->kind[o->sorted[end]]] = -1;
        for (int64_t each = first; each < end; each++) { /* the kinds, sorted */
            const int32_t kind = o->kind[o->sorted[each]];
            int64_t place = kinds;
            if (o->number[kind] != -1)
                continue;
            o->number[kind] = 0;
            for (; place > 0 && o->left[place - 1] > kind; place--)
                o->left[place] = o->left[place - 1];
            o->left[place] = kind;
            kinds++;
        }
        for (int64_t each = 0; each < kinds; each++)
            o->number[o->left[each]] = step++;
        for (int64_t each = first; each < end; each++)
            o->other[o->sorted[each]] = o->number[o->kind[o->sorted[each]]];
    }
    return step;
}

/* Like `go_by_depth`, but each step takes all ready calls of the kind whose remaining calls are
   shallowest on average. */
static int32_t go_by_agenda(struct order *o, int64_t first, int64_t last, int32_t step)
{
    for (int64_t kind = 0; kind < o->kinds; kind++) {
        o->ready[kind] = -1;
        o->left[kind] = 0;
        o->depth_left[kind] = 0;
    }
    for (int64_t each = first; each < last; each++) {
        const int32_t call = o->sorted[each], kind = o->kind[call];
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
        for (int64_t kind = 0; kind < o->kinds; kind++)
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
                const int32_t user = o->user[each], kind = o->kind[user];
                if (!--o->waiting[user]) {
                    o->next[user] = o->ready[kind];
                    o->ready[kind] = user;
                }
            }
        }
    }
    return step;
}

/* Lists the calls of the same group that read the results of each call. */
static void list_users(struct order *o)
{
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t call = 0; call < o->calls; call++) {
            o->waiting[call] = 0;
            for (int64_t read = o->first_read[call]; read < o->first_read[call + 1]; read++) {
                const int32_t source = source_of(o, read);
                if (source < 0 || o->group[source] != o->group[call])
                    continue;
                o->waiting[call]++;
                if (pass)
                    o->user[o->first_user[source + 1]++] = (int32_t)call;
                else
                    o->first_user[source + 2]++;
            }
        }
        for (int64_t call = 0; !pass && call < o->calls; call++)
            o->first_user[call + 2] += o->first_user[call + 1];
    }
}

/* Numbers the kinds that are called without gaps; returns how many there are. */
static int64_t number_kinds(const struct order *o, int32_t *number, int32_t *kind)
{
    int32_t kinds = 0;
    for (int64_t call = 0; call < o->calls; call++)
        number[o->kind[call]] = 1;
    for (int64_t each = 0; each < o->kinds; each++)
        number[each] = number[each] ? kinds++ : -1;
    for (int64_t call = 0; call < o->calls; call++)
        kind[call] = number[o->kind[call]];
    return kinds;
}

static int64_t order_numbered(struct order *o)
{
    const int64_t calls = o->calls, kinds = o->kinds, reads = o->first_read[calls];
    int32_t steps = 0;
    o->words = (kinds + 63) / 64;
    o->reach = calloc(kinds * o->words + 1, sizeof *o->reach);
    o->depth_left = malloc((kinds + 1) * sizeof *o->depth_left);
    int32_t *room = calloc(9 * calls + 2 * kinds + reads + 4 * kinds + 8, sizeof *room);
    if (!o->reach || !o->depth_left || !room)
        steps = -1;
    else {
        int32_t *next = room;
        int32_t **of_call[] = {&o->group, &o->depth, &o->sorted, &o->waiting, &o->next, &o->other};
        int32_t **of_kind[] = {&o->group_of_kind, &o->ready, &o->number, &o->left};
        for (int each = 0; each < COUNT(of_call); each++, next += calls)
            *of_call[each] = next;
        for (int each = 0; each < COUNT(of_kind); each++, next += kinds)
            *of_kind[each] = next;
        o->first_user = next;
        o->user = next + calls + 2;
        int32_t *const first = o->user + reads, *const level = first + calls + 1;
        const int32_t groups = find_groups(o);
        sort_calls(o, groups, first, level);
        if (o->agenda)
            list_users(o);
        for (int64_t start = 0, end; start < calls; start = end) {
            const int32_t group = o->group[o->sorted[start]], before = steps;
            for (end = start; end < calls && o->group[o->sorted[end]] == group;)
                end++;
            steps = go_by_depth(o, start, end, before);
            if (o->agenda) {
                const int32_t other = go_by_agenda(o, start, end, before);
                if (other <= steps) {
                    steps = other;
                    continue;
                }
            }
            for (int64_t each = start; each < end; each++)
                o->step[o->sorted[each]] = o->other[o->sorted[each]];
        }
    }
    free(o->reach);
    free(o->depth_left);
    free(room);
    return steps;
}

/* Returns the number of steps, or -1 without memory. */
static int64_t order(struct order *o)
{
    int32_t *const number = calloc(o->kinds + o->calls + 1, sizeof *number);
    int64_t steps = -1;
    if (number) {
        int32_t *const kind = number + o->kinds;
        o->kinds = number_kinds(o, number, kind);
        o->kind = kind;
        steps = order_numbered(o);
    }
    free(number);
    return steps;
}

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
    int64_t *call;   /* result: for each step its kind and number of calls, for each of its results
                        the first row */
    int64_t *slices; /* result: for each argument of each step its begin in `index`, its length, its
                        first row if they are contiguous or -1, and the begin of the calls or -1 */
    int64_t width;   /* room: entries of `call` per step */
};

/* The first of rows that are contiguous, 0 if there are none, or -1. */
static int64_t first_row(const int64_t *rows, int64_t count)
{
    for (int64_t each = 1; each < count; each++)
        if (rows[each] != rows[0] + each)
            return -1;
    return count ? rows[0] : 0;
}

/* Goes through the arguments that a call reads from other steps. */
struct piece {
    int32_t values, node, argument;
    int is_ragged;
    const int32_t *next, *refer; /* in the code; in the chain, or NULL */
};

static int next_piece(const struct place *p, int32_t call, struct piece *piece)
{
    const struct sites *s = p->sites;
    const int32_t *const members = p->member + p->first_member[call];
    const int32_t nodes = p->first_member[call + 1] - p->first_member[call];
    if (piece->node < 0) { /* the first */
        const int32_t fused = p->kind[call] - (int32_t)p->num_signatures;
        *piece = (struct piece){.refer = fused < 0 ? NULL : p->chain + p->first_chain[fused] + 3,
                                .next = p->code + *members + 1, .argument = -1};
    } else
        piece->next += piece->values;
    for (;;) {
        const int32_t signature = s->signature[p->code[members[piece->node]]];
        if (++piece->argument == s->arguments[signature]) {
            if (++piece->node == nodes)
                return 0;
            piece->argument = -1;
            piece->next = p->code + members[piece->node] + 1;
            piece->refer += piece->refer ? s->arguments[signature] + 1 : 0;
            continue;
        }
        piece->is_ragged = is_ragged(s, signature, piece->argument);
        piece->values = values_of(s, signature, piece->argument, &piece->next);
        if (!piece->refer || piece->refer[piece->argument] < 0)
            return 1;
        piece->next += piece->values;
    }
}

/* The number of outputs of a call; `node` and `result` of each, counted from 0. */
static int32_t output_of(const struct place *p, int32_t call, int32_t number, int32_t *result)
{
    const int32_t fused = p->kind[call] - (int32_t)p->num_signatures;
    const int32_t begin = p->member[p->first_member[call]];
    *result = number;
    if (fused < 0)
        return number < p->sites->results[p->code[begin]] ? 0 : -1;
    const int32_t *next = p->chain + p->first_chain[fused], nodes = next[0], outputs = next[1];
    if (number >= outputs)
        return -1;
    next += 2;
    for (int32_t node = 0; node < nodes; node++)
        next += 1 + p->sites->arguments[*next];
    *result = next[2 * number + 1];
    return next[2 * number];
}

/* The steps, their results, and the lengths of what they read; returns the number of slices. */
static int64_t place_results(struct place *p, int32_t *position, int32_t *one_of, int64_t *first,
                             uint8_t *is_any_ragged)
{
    const struct sites *s = p->sites;
    int64_t slices = 0;
    int32_t node, result;
    memset(p->call, 0, p->steps * p->width * sizeof *p->call);
    for (int32_t call = 0; call < p->calls; call++) {
        int64_t *step = p->call + p->step[call] * p->width;
        one_of[p->step[call]] = call;
        step[0] = p->kind[call];
        position[call] = (int32_t)step[1]++;
    }
    for (int64_t each = 0; each < p->steps; each++) {
        int64_t *step = p->call + each * p->width;
        const int32_t call = one_of[each], *const members = p->member + p->first_member[call];
        for (int32_t out = 0; (node = output_of(p, call, out, &result)) >= 0; out++) {
            const int32_t site = p->code[members[node]];
            int64_t *free_row = p->free + s->type[site * s->most_results + result];
            step[2 + out] = *free_row;
            *free_row += step[1];
        }
        first[each] = slices;
        is_any_ragged[each] = 0;
        for (struct piece piece = {.node = -1}; next_piece(p, call, &piece);) {
            is_any_ragged[each] |= piece.is_ragged;
            p->slices[4 * slices++ + 1] = piece.is_ragged ? 0 : step[1];
        }
    }
    first[p->steps] = slices;
    for (int32_t call = 0; call < p->calls; call++) {
        const int64_t *step = p->call + p->step[call] * p->width;
        const int32_t *const members = p->member + p->first_member[call];
        for (int32_t out = 0; (node = output_of(p, call, out, &result)) >= 0; out++)
            p->row[members[node] + result] = (int32_t)step[2 + out] + position[call];
        if (!is_any_ragged[p->step[call]])
            continue;
        int64_t *slice = p->slices + 4 * first[p->step[call]];
        for (struct piece piece = {.node = -1}; next_piece(p, call, &piece); slice += 4)
            if (piece.is_ragged)
                slice[1] += piece.values;
    }
    return slices;
}

/* Writes the rows that one call reads; slice[2] is where the rows of its next call go. */
static void place_reads(struct place *p, int64_t call, int64_t *slices, int64_t count)
{
    const int32_t *read = p->read + p->first_read[call];
    for (int64_t each = 0; each < count; each++)
        p->index[slices[4 * each + 2]++] = p->row[read[each]];
}

/* The same for a call with ragged arguments. */
static void place_ragged_reads(struct place *p, int32_t call, int32_t position, int64_t *slice)
{
    const int32_t *read = p->read + p->first_read[call];
    for (struct piece piece = {.node = -1}; next_piece(p, call, &piece); slice += 4)
        for (int32_t each = 0; each < piece.values; each++) {
            if (slice[3] >= 0)
                p->index[slice[3] + slice[2] - slice[0]] = position;
            p->index[slice[2]++] = p->row[*read++];
        }
}

/* Returns the number of slices, or -1 without memory. */
static int64_t place(struct place *p)
{
    int64_t slices = -1, entry = 0, *const first = malloc((p->steps + 1) * sizeof *first);
    int32_t *const position = malloc((p->calls + p->steps + 1) * sizeof *position);
    uint8_t *const is_any_ragged = malloc(p->steps + 1);
    p->width = 2 + p->most_outputs;
    if (first && position && is_any_ragged) {
        int32_t *one_of = position + p->calls;
        slices = place_results(p, position, one_of, first, is_any_ragged);
        for (int64_t each = 0, slice = 0; each < p->steps; each++)
            for (struct piece piece = {.node = -1}; next_piece(p, one_of[each], &piece);) {
                int64_t *mine = p->slices + 4 * slice++;
                mine[0] = mine[2] = entry;
                entry += mine[1];
                mine[3] = piece.is_ragged ? entry : -1;
                entry += piece.is_ragged ? mine[1] : 0;
            }
        for (int32_t call = 0; call < p->calls; call++) {
            const int64_t own = p->step[call];
            int64_t *mine = p->slices + 4 * first[own];
            if (is_any_ragged[own])
                place_ragged_reads(p, call, position[call], mine);
            else
                place_reads(p, call, mine, first[own + 1] - first[own]);
        }
        for (int64_t slice = 0; slice < slices; slice++) {
            int64_t *mine = p->slices + 4 * slice;
            mine[2] = first_row(p->index + mine[0], mine[1]);
        }
    }
    free(first);
    free(position);
    free(is_any_ragged);
    return slices;
}

static const struct field fields_of_order[] = {
    FIELD(order, calls), FIELD(order, kinds), FIELD(order, agenda), FIELD(order, kind),
    FIELD(order, row), FIELD(order, call), FIELD(order, first_read), FIELD(order, read),
    FIELD(order, step),
};
static const struct field fields_of_place[] = {
    FIELD(place, sites), FIELD(place, code), FIELD(place, calls), FIELD(place, steps),
    FIELD(place, num_signatures), FIELD(place, most_outputs), FIELD(place, first_read),
    FIELD(place, read), FIELD(place, step), FIELD(place, kind), FIELD(place, first_member),
    FIELD(place, member), FIELD(place, first_chain), FIELD(place, chain), FIELD(place, row),
    FIELD(place, free), FIELD(place, index), FIELD(place, call), FIELD(place, slices),
};

FUNCTION(order)
FUNCTION(place)

PyMethodDef steps_functions[] = {
    METHOD(order, "Assign calls to steps; return the number of steps."),
    METHOD(place, "List the rows that steps read and write; return the number of slices."),
    {NULL, NULL, 0, NULL},
};
