/* The steps of recorded calls. core/definitions.py says what these functions compute; they trust
   their arguments. */

#include "recordings.h"
#include <stdlib.h>
#include <string.h>

/* Assigns calls to steps. Kinds of calls that depend on each other form a group, and groups run one
   after the other; within a group, calls go by depth, or by the agenda where that is as short. */
struct order {
    int64_t calls, kinds, agenda;
    int32_t *kind;             /* of each call */
    const int32_t *row, *call; /* of each value, as `merge` leaves them */
    const int32_t *first_read, *read;
    int32_t *step; /* result: of each call */
    /* Room: of each call; of each kind; the calls that read a result; and by_depth's steps. */
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

/* Returns the number of steps, or -1 without memory. */
static int64_t order(struct order *o)
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

enum { MOST_FUSED = 64 }; /* operations of a step, which bounds the recursion of `expand` */

/* Calls of which each is read by one other call only, at the same argument of the same operation,
   run in the step of that call; see `can_fuse`. */
struct fuse {
    const struct sites *sites;
    const int32_t *code;
    int64_t num_sites, calls, kinds;
    const int32_t *outputs; /* values that others read */
    int64_t num_outputs;
    const int32_t *value, *row; /* of each value, as `merge` leaves them */
    int32_t *call;              /* also the result: of the results of the calls that remain */
    const int32_t *owner;
    int32_t *begin, *first_read, *read; /* also the results: of the calls that remain */
    int32_t *fused; /* result: for each argument of each signature the one that is fused, or -1 */
    /* Room: the argument that reads the calls of each kind, what makes each argument (-1 if not
       met, MANY if not the same for all); fused operations of each kind; readers of each call. */
    int32_t *reader, *maker, *size, *readers;
    struct order order;
};

enum { MANY = -2 };

/* The values of one argument of a call, or of one that is fused with it. */
struct piece {
    const int32_t *next;
    int32_t values;
    int is_ragged;
};

/* Lists the arguments that a call and those fused with it read from other steps. */
static int32_t expand(const struct sites *s, const int32_t *code, const int32_t *value,
                      const int32_t *owner, const int32_t *fused, int32_t begin,
                      struct piece *pieces)
{
    const int32_t signature = s->signature[code[begin]], *next = code + begin + 1;
    int32_t found = 0;
    for (int32_t argument = 0; argument < s->arguments[signature]; argument++) {
        if (fused[signature * s->most_arguments + argument] >= 0) {
            found += expand(s, code, value, owner, fused, owner[value[*next++]], pieces + found);
            continue;
        }
        const int32_t values = values_of(s, signature, argument, &next);
        pieces[found++] = (struct piece){next, values, is_ragged(s, signature, argument)};
        next += values;
    }
    return found;
}

static int32_t kind_of(const struct fuse *f, int32_t value)
{
    return f->sites->signature[f->code[f->owner[value]]];
}

/* Notes which argument reads the calls of each kind, and what makes each argument. */
static void find_readers(struct fuse *f)
{
    const struct sites *s = f->sites;
    for (int64_t call = 0; call < f->calls; call++) {
        const int32_t kind = s->signature[f->code[f->begin[call]]];
        const int32_t *next = f->code + f->begin[call] + 1;
        f->order.kind[call] = kind;
        for (int32_t argument = 0; argument < s->arguments[kind]; argument++) {
            const int32_t slot = kind * (int32_t)s->most_arguments + argument;
            for (int32_t left = values_of(s, kind, argument, &next); left > 0; left--) {
                const int32_t value = f->value[*next++];
                if (f->row[value] >= 0) {
                    f->maker[slot] = MANY;
                    continue;
                }
                const int32_t source = kind_of(f, value), known = f->maker[slot];
                const int is_alone = !f->readers[f->call[value]]++ && !is_ragged(s, kind, argument);
                const int is_same = f->reader[source] == -1 || f->reader[source] == slot;
                f->reader[source] = is_alone && is_same ? slot : MANY;
                f->maker[slot] = known == -1 || known == source ? source : MANY;
            }
        }
    }
    for (int64_t each = 0; each < f->num_outputs; each++) {
        const int32_t value = f->value[f->outputs[each]];
        if (f->row[value] < 0)
            f->reader[kind_of(f, value)] = MANY;
    }
    for (int64_t call = 0; call < f->calls; call++)
        if (!f->readers[call])
            f->reader[f->order.kind[call]] = MANY;
}

/* Whether all calls of a kind are the same argument of all calls of one other kind, and batching
   is not lost: calls outside a recursion run in one step, those inside one per level. */
static int can_fuse(const struct fuse *f, int32_t kind)
{
    const int32_t slot = f->reader[kind], user = slot / (int32_t)f->sites->most_arguments;
    return slot >= 0 && f->maker[slot] == kind &&
           (!reaches(&f->order, user, user) || reaches(&f->order, user, kind));
}

static void fuse_kinds(struct fuse *f)
{
    const int32_t width = (int32_t)f->sites->most_arguments;
    for (int32_t kind = 0; kind < f->kinds; kind++) {
        if (!can_fuse(f, kind))
            continue;
        int32_t top = f->reader[kind] / width;
        while (f->reader[top] >= 0 && f->fused[f->reader[top]] == top)
            top = f->reader[top] / width;
        if (f->size[kind] + f->size[top] <= MOST_FUSED) {
            f->fused[f->reader[kind]] = kind;
            f->size[top] += f->size[kind];
        }
    }
}

/* Removes the fused calls; what they read is read by the calls that remain. */
static int64_t remove_fused(struct fuse *f, struct piece *pieces)
{
    const struct sites *s = f->sites;
    int32_t calls = 0, reads = 0;
    for (int64_t call = 0; call < f->calls; call++) {
        const int32_t begin = f->begin[call], slot = f->reader[f->order.kind[call]];
        if (slot >= 0 && f->fused[slot] >= 0)
            continue;
        const int32_t found = expand(s, f->code, f->value, f->owner, f->fused, begin, pieces);
        f->first_read[calls] = reads;
        for (int32_t piece = 0; piece < found; piece++)
            for (int32_t each = 0; each < pieces[piece].values; each++)
                f->read[reads++] = f->value[pieces[piece].next[each]];
        for (int32_t result = 0; result < s->results[f->code[begin]]; result++)
            f->call[begin + result] = calls;
        f->begin[calls++] = begin;
    }
    f->first_read[calls] = reads;
    return calls;
}

/* Returns the number of calls that remain, or -1 without memory. */
static int64_t fuse(struct fuse *f)
{
    const int64_t kinds = f->kinds, slots = kinds * f->sites->most_arguments;
    const int64_t most_pieces = MOST_FUSED * f->sites->most_arguments;
    struct order *o = &f->order;
    *o = (struct order){.calls = f->calls, .kinds = kinds, .row = f->row, .call = f->call,
                        .first_read = f->first_read, .read = f->read, .words = (kinds + 63) / 64};
    int32_t *const room = calloc(2 * kinds + slots + 2 * f->calls + 1, sizeof *room);
    struct piece *const pieces = malloc((most_pieces + 1) * sizeof *pieces);
    o->reach = calloc(kinds * o->words + 1, sizeof *o->reach);
    int64_t calls = -1;
    if (room && pieces && o->reach) {
        f->reader = room;
        f->maker = f->reader + kinds;
        f->size = f->maker + slots;
        f->readers = f->size + kinds;
        o->kind = f->readers + f->calls;
        memset(f->reader, -1, (kinds + slots) * sizeof *f->reader);
        memset(f->fused, -1, slots * sizeof *f->fused);
        for (int64_t kind = 0; kind < kinds; kind++)
            f->size[kind] = 1;
        for (int64_t site = 0; site < f->num_sites; site++)
            if (f->sites->kind[site] == CALL &&
                (f->sites->results[site] > 1 || !f->sites->arguments[f->sites->signature[site]]))
                f->reader[f->sites->signature[site]] = MANY;
        find_readers(f);
        find_reach(o);
        fuse_kinds(f);
        calls = remove_fused(f, pieces);
    }
    free(room);
    free(pieces);
    free(o->reach);
    return calls;
}

/* Gives the results of every step rows, and lists the rows that it reads. */
struct place {
    const struct sites *sites;
    const int32_t *code;
    int64_t calls, steps;
    const int32_t *begin, *first_read, *read, *step;
    const int32_t *value, *owner, *fused; /* as `fuse` leaves them */
    int32_t *row;    /* of each value; result: also those of results */
    int64_t *free;   /* the first free row of each row type; result: after all results */
    int64_t *index;  /* result: row numbers, argument by argument */
    int64_t *call;   /* result: for each step its signature and number of calls, for each of its
                        results the first row */
    int64_t *slices; /* result: for each argument of each step its begin in `index`, its length, its
                        first row if they are contiguous or -1, and the begin of the calls or -1 */
    struct piece *pieces; /* room */
};

/* The first of rows that are contiguous, 0 if there are none, or -1. */
static int64_t first_row(const int64_t *rows, int64_t count)
{
    for (int64_t each = 1; each < count; each++)
        if (rows[each] != rows[0] + each)
            return -1;
    return count ? rows[0] : 0;
}

/* Lists what a call reads from other steps. */
static int32_t pieces_of(const struct place *p, int32_t begin)
{
    return expand(p->sites, p->code, p->value, p->owner, p->fused, begin, p->pieces);
}

/* The steps, their results, and the lengths of what they read; returns the number of slices. */
static int64_t place_results(struct place *p, int32_t *position, int32_t *one_of, int64_t *first,
                             uint8_t *is_any_ragged)
{
    const struct sites *s = p->sites;
    const int64_t width = 2 + s->most_results;
    int64_t slices = 0;
    memset(p->call, 0, p->steps * width * sizeof *p->call);
    for (int64_t call = 0; call < p->calls; call++) {
        int64_t *step = p->call + p->step[call] * width;
        one_of[p->step[call]] = p->begin[call];
        step[0] = s->signature[p->code[p->begin[call]]];
        position[call] = (int32_t)step[1]++;
    }
    for (int64_t each = 0; each < p->steps; each++) {
        int64_t *step = p->call + each * width;
        const int32_t site = p->code[one_of[each]], found = pieces_of(p, one_of[each]);
        for (int32_t slot = 0; slot < s->results[site]; slot++) {
            int64_t *free_row = p->free + s->type[site * s->most_results + slot];
            step[2 + slot] = *free_row;
            *free_row += step[1];
        }
        first[each] = slices;
        is_any_ragged[each] = 0;
        for (int32_t piece = 0; piece < found; piece++) {
            is_any_ragged[each] |= p->pieces[piece].is_ragged;
            p->slices[4 * slices++ + 1] = p->pieces[piece].is_ragged ? 0 : step[1];
        }
    }
    first[p->steps] = slices;
    for (int64_t call = 0; call < p->calls; call++) {
        const int64_t *step = p->call + p->step[call] * width;
        const int32_t begin = p->begin[call];
        for (int32_t slot = 0; slot < s->results[p->code[begin]]; slot++)
            p->row[begin + slot] = (int32_t)step[2 + slot] + position[call];
        const int32_t found = is_any_ragged[p->step[call]] ? pieces_of(p, begin) : 0;
        for (int32_t piece = 0; piece < found; piece++)
            if (p->pieces[piece].is_ragged)
                p->slices[4 * (first[p->step[call]] + piece) + 1] += p->pieces[piece].values;
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
static void place_ragged_reads(struct place *p, int64_t call, int32_t position, int64_t *slices)
{
    const int32_t found = pieces_of(p, p->begin[call]), *read = p->read + p->first_read[call];
    for (int32_t piece = 0; piece < found; piece++) {
        int64_t *slice = slices + 4 * piece;
        for (int32_t each = 0; each < p->pieces[piece].values; each++) {
            if (slice[3] >= 0)
                p->index[slice[3] + slice[2] - slice[0]] = position;
            p->index[slice[2]++] = p->row[*read++];
        }
    }
}

/* Returns the number of slices, or -1 without memory. */
static int64_t place(struct place *p)
{
    int64_t slices = -1, entry = 0, *const first = malloc((p->steps + 1) * sizeof *first);
    int32_t *const position = malloc((p->calls + p->steps + 1) * sizeof *position);
    uint8_t *const is_any_ragged = malloc(p->steps + 1);
    p->pieces = malloc((MOST_FUSED * p->sites->most_arguments + 1) * sizeof *p->pieces);
    if (first && position && is_any_ragged && p->pieces) {
        int32_t *one_of = position + p->calls;
        slices = place_results(p, position, one_of, first, is_any_ragged);
        for (int64_t each = 0, slice = 0; each < p->steps; each++) {
            const int32_t found = pieces_of(p, one_of[each]);
            for (int32_t piece = 0; piece < found; piece++) {
                int64_t *mine = p->slices + 4 * slice++;
                mine[0] = mine[2] = entry;
                entry += mine[1];
                mine[3] = p->pieces[piece].is_ragged ? entry : -1;
                entry += p->pieces[piece].is_ragged ? mine[1] : 0;
            }
        }
        for (int64_t call = 0; call < p->calls; call++) {
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
    free(p->pieces);
    return slices;
}

static const struct field fields_of_order[] = {
    FIELD(order, calls), FIELD(order, kinds), FIELD(order, agenda), FIELD(order, kind),
    FIELD(order, row), FIELD(order, call), FIELD(order, first_read), FIELD(order, read),
    FIELD(order, step),
};
static const struct field fields_of_fuse[] = {
    FIELD(fuse, sites), FIELD(fuse, code), FIELD(fuse, num_sites), FIELD(fuse, calls),
    FIELD(fuse, kinds), FIELD(fuse, outputs), FIELD(fuse, num_outputs), FIELD(fuse, value),
    FIELD(fuse, row), FIELD(fuse, call), FIELD(fuse, owner), FIELD(fuse, begin),
    FIELD(fuse, first_read), FIELD(fuse, read), FIELD(fuse, fused),
};
static const struct field fields_of_place[] = {
    FIELD(place, sites), FIELD(place, code), FIELD(place, calls), FIELD(place, steps),
    FIELD(place, begin), FIELD(place, first_read), FIELD(place, read), FIELD(place, step),
    FIELD(place, value), FIELD(place, owner), FIELD(place, fused), FIELD(place, row),
    FIELD(place, free), FIELD(place, index), FIELD(place, call), FIELD(place, slices),
};

FUNCTION(fuse)
FUNCTION(order)
FUNCTION(place)

PyMethodDef steps_functions[] = {
    METHOD(fuse, "Fuse calls with those that read them; return the number of the others."),
    METHOD(order, "Assign calls to steps; return the number of steps."),
    METHOD(place, "List the rows that steps read and write; return the number of slices."),
    {NULL, NULL, 0, NULL},
};
