/* Lets calls that always come together run in one step, as one *chain*.

   Calls of one signature that are made at one place of the user's code are of one *kind*. If each
   call of a kind reads, as one argument, a call of its own of another kind, these run together, and
   so on. A chain has as many *instances* as each of its kinds has calls; calls that are left over
   become a kind of their own. At the nodes of trees,

       h = tanh(add(left(a), right(b)))

   the kinds left, right, add and tanh become one chain: each `add` reads a `left` and a `right` of
   its own, each `tanh` an `add`. Leaves are read by `left` and `right`, too, so that the chain of a
   node is not joined by those of its children.

   What could run in few steps does not run in many, such as what a recursion reads or what reads
   its results. All that an instance reads must be shallower than all that others read from it. So
   instances never wait for each other, and what they make is ready when the shallowest of it could
   be. */

#include "arena.h"
#include "graph.h"
#include "recordings.h"
#include <string.h>

enum { MOST_FUSED = 64, MOST_ARGUMENTS = 8, MOST_PASSES = 8 };

struct kind {
    int32_t signature, count, first; /* its calls: `call_of[first]` and after, one per instance */
    int32_t chain, next, node;       /* the chain, the next of its kinds or -1, its number there */
    int32_t is_list;                 /* whether an argument is ragged, or there are many */
};

struct chain {
    int32_t size, count, first, last; /* `size` kinds, with `count` calls each */
};

struct fuse {
    const struct sites *sites;
    const int32_t *code;
    int64_t calls, num_signatures;
    const uint8_t *kept;        /* of each value, whether it is read later */
    const int32_t *place;       /* of each value, where in the user's code it is made; or NULL */
    const int32_t *value, *row; /* of each value, as `merge` leaves them */
    int32_t *call;              /* also the result: of each value, the instance that makes it */
    int32_t *begin, *first_read, *read; /* of calls; result: of instances: what they read */
    int32_t *kind; /* result: of each instance, its signature, or after these a fused chain */
    int32_t *first_member, *member; /* result: where the calls of each instance begin in the code */
    int32_t *first_chain, *chain;   /* result: of each fused chain, see `write_chain` */
    int64_t *counts; /* result: fused chains, most outputs of one; in `first_chain`, their ends */
    /* Room. */
    struct arena arena;
    struct graph graph; /* of the calls */
    int32_t num_kinds, attempt;
    struct kind *kinds;
    struct chain *chains;                        /* at first one of each kind, by its number */
    int32_t *begin_of;                           /* of each call: as `begin` was */
    int32_t *kind_of, *instance, *depth, *ready; /* of each call */
    int32_t *call_of;                            /* kind by kind, instance by instance */
    int32_t *uses, *inside;          /* of each value: its reads, and those of one instance */
    int32_t *level, *before, *moved; /* of each call; the latter while instances are renumbered */
    int32_t *seen;      /* of each number, the latest attempt to count different ones */
    int32_t *number;    /* of each chain, as in `kind` */
    uint8_t *is_output; /* of each value of the first instance of a chain */
    int64_t like[MOST_FUSED * MOST_ARGUMENTS]; /* what the reads of the first instance refer to */
};

static int32_t results_of(const struct fuse *f, int32_t call)
{
    return f->sites->results[f->code[f->begin_of[call]]];
}

static int32_t chain_of(const struct fuse *f, int32_t call)
{
    return f->kinds[f->kind_of[call]].chain;
}

/* Whether a number comes for the first time in this attempt. */
static int is_new(struct fuse *f, int32_t number)
{
    const int is = f->seen[number] != f->attempt;
    f->seen[number] = f->attempt;
    return is;
}

/* The result of its own instance that a call reads, as the number of its kind times
   `most_results` plus its own; -1 if it reads another. */
static int64_t refer_of(const struct fuse *f, int32_t call, int32_t read)
{
    const int32_t value = f->graph.read[read], maker = maker_of(&f->graph, value);
    if (maker < 0 || f->instance[maker] != f->instance[call] ||
        chain_of(f, maker) != chain_of(f, call))
        return -1;
    return f->kind_of[maker] * f->sites->most_results + value - f->begin_of[maker];
}

/* Kinds of calls. */

/* Adds a kind that is a chain of its own. */
static void add_kind(struct fuse *f, struct kind kind)
{
    kind.chain = f->num_kinds;
    kind.next = -1;
    f->chains[kind.chain] = (struct chain){1, kind.count, kind.chain, kind.chain};
    f->kinds[f->num_kinds++] = kind;
}

/* Numbers the kinds of calls; -1 without memory. */
static int find_kinds(struct fuse *f)
{
    const struct sites *const s = f->sites;
    int32_t *const pair = new_array(&f->arena, 2 * f->calls, sizeof *pair);
    if (!pair)
        return -1;
    for (int64_t call = 0; call < f->calls; call++) {
        const int32_t begin = f->begin_of[call];
        pair[2 * call] = s->signature[f->code[begin]];
        pair[2 * call + 1] = f->place ? f->place[begin] : 0;
    }

    struct distinct pairs = {.rows = (const char *)pair,
                             .count = f->calls,
                             .width = 2 * sizeof *pair,
                             .number = f->kind_of,
                             .first = f->before};
    f->graph.kinds = distinct(&pairs);
    if (f->graph.kinds < 0)
        return -1;
    for (int64_t call = 0; call < f->calls; call++)
        f->instance[call] = f->moved[f->kind_of[call]]++; /* counts them */

    for (int32_t kind = 0, first = 0; kind < f->graph.kinds; kind++) {
        const int32_t signature = pair[2 * f->before[kind]], arguments = s->arguments[signature];
        int32_t is_list = arguments > MOST_ARGUMENTS;
        for (int32_t argument = 0; argument < arguments; argument++)
            is_list |= is_ragged(s, signature, argument);
        add_kind(f, (struct kind){.signature = signature,
                                  .count = f->moved[kind],
                                  .first = first,
                                  .is_list = is_list});
        first += f->moved[kind];
    }

    for (int32_t call = 0; call < f->calls; call++)
        f->call_of[f->kinds[f->kind_of[call]].first + f->instance[call]] = call;
    return 0;
}

/* Finds the levels of calls within recursions; -1 without memory. */
static int find_own_levels(struct fuse *f)
{
    int32_t *const group = new_array(&f->arena, f->graph.kinds, sizeof *group);
    if (!group || find_groups(&f->graph, group) < 0)
        return -1;
    find_levels(&f->graph, group, f->level);
    return 0;
}

static void count_uses(struct fuse *f)
{
    const struct graph *const g = &f->graph;
    for (int32_t call = 0; call < f->calls; call++) {
        const int32_t begin = f->begin_of[call];
        f->depth[call] = 1;
        for (int32_t result = 0; result < results_of(f, call); result++)
            f->uses[begin + result] = f->kept[begin + result];
        for (int32_t read = g->first_read[call]; read < g->first_read[call + 1]; read++) {
            const int32_t maker = maker_of(g, g->read[read]);
            if (maker < 0)
                continue;
            f->uses[g->read[read]]++;
            if (f->depth[maker] >= f->depth[call])
                f->depth[call] = f->depth[maker] + 1;
        }
    }
}

/* Chains. */

/* Notes what the reads of the first instance of a chain refer to. */
static void note_first(struct fuse *f, const struct chain *chain)
{
    int64_t *next = f->like;
    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        const struct kind *const k = f->kinds + kind;
        const int32_t call = f->call_of[k->first], end = f->graph.first_read[call + 1];
        for (int32_t read = f->graph.first_read[call]; !k->is_list && read < end; read++)
            *next++ = refer_of(f, call, read);
    }
}

/* The depth of the shallowest call of an instance that others read, or INT32_MAX; 0 if the instance
   cannot run at once, or other reads than those of the first one, which was noted, are its own.
   Notes what others read. */
static int32_t find_depth(struct fuse *f, const struct chain *chain, int32_t instance,
                          uint8_t *is_output)
{
    const struct graph *const g = &f->graph;
    int32_t deepest = 0, shallowest = INT32_MAX, is_alike = 1;
    const int64_t *like = f->like;

    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        const struct kind *const k = f->kinds + kind;
        const int32_t call = f->call_of[k->first + instance];
        for (int32_t read = g->first_read[call]; read < g->first_read[call + 1]; read++) {
            const int32_t value = g->read[read], maker = maker_of(g, value);
            const int64_t refer = refer_of(f, call, read);
            is_alike &= refer == (k->is_list ? -1 : *like++);
            if (refer >= 0)
                f->inside[value]++;
            else if (maker >= 0 && f->depth[maker] > deepest)
                deepest = f->depth[maker];
        }
    }

    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        const int32_t call = f->call_of[f->kinds[kind].first + instance];
        for (int32_t result = 0; result < results_of(f, call); result++) {
            const int32_t value = f->begin_of[call] + result;
            const int is_read = f->uses[value] > f->inside[value];
            f->inside[value] = 0;
            if (is_read && f->depth[call] < shallowest)
                shallowest = f->depth[call];
            if (is_read && is_output)
                is_output[f->begin_of[f->call_of[f->kinds[kind].first]] + result] = 1;
        }
    }
    return is_alike && deepest < shallowest ? shallowest : 0;
}

/* The kind whose calls make an argument of all calls of a reader, one for each; -1 if there is
   none. Lists these calls in `moved`. */
static int32_t kind_of_makers(struct fuse *f, const struct kind *reader, int32_t argument)
{
    int32_t kind = -1;
    f->attempt++;
    for (int32_t each = 0; each < reader->count; each++) {
        const int32_t read = f->graph.first_read[f->call_of[reader->first + each]] + argument;
        const int32_t maker = maker_of(&f->graph, f->graph.read[read]);
        if (maker < 0 || (kind >= 0 && f->kind_of[maker] != kind) || !is_new(f, f->instance[maker]))
            return -1;
        kind = f->kind_of[maker];
        f->moved[each] = maker;
    }
    return kind;
}

static int32_t count_levels(struct fuse *f, const int32_t *calls, int32_t count)
{
    int32_t levels = 0;
    f->attempt++;
    for (int32_t each = 0; each < count; each++)
        levels += is_new(f, f->level[calls[each]]);
    return levels;
}

/* Puts the instances of a chain whose calls are listed in `moved` before its others. */
static void move_instances(struct fuse *f, const struct chain *chain, int32_t count)
{
    int32_t *const before = f->before, others = count;
    f->attempt++;
    for (int32_t each = 0; each < count; each++) {
        before[each] = f->instance[f->moved[each]];
        is_new(f, before[each]);
    }
    for (int32_t instance = 0; instance < chain->count; instance++)
        if (is_new(f, instance))
            before[others++] = instance;

    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        int32_t *const calls = f->call_of + f->kinds[kind].first;
        memcpy(f->moved, calls, chain->count * sizeof *calls);
        for (int32_t instance = 0; instance < chain->count; instance++) {
            calls[instance] = f->moved[before[instance]];
            f->instance[calls[instance]] = instance;
        }
    }
}

/* Moves the kinds of a chain to the end of another one. */
static void append_kinds(struct fuse *f, int32_t from, int32_t to)
{
    struct chain *const source = f->chains + from, *const chain = f->chains + to;
    for (int32_t kind = source->first; kind >= 0; kind = f->kinds[kind].next)
        f->kinds[kind].chain = to;
    f->kinds[chain->last].next = source->first;
    chain->last = source->last;
    chain->size += source->size;
    source->size = 0;
}

/* Makes a chain of the instances from `count` on; the kinds are `first` and those after it. */
static void split_off(struct fuse *f, int32_t first, int32_t count)
{
    const int32_t number = f->num_kinds;
    for (int32_t each = first; each >= 0; each = f->kinds[each].next) {
        struct kind kind = f->kinds[each];
        kind.first += count;
        kind.count -= count;
        f->kinds[each].count = count;
        for (int32_t instance = 0; instance < kind.count; instance++) {
            const int32_t call = f->call_of[kind.first + instance];
            f->kind_of[call] = f->num_kinds;
            f->instance[call] = instance;
        }
        add_kind(f, kind);
        if (each != first)
            append_kinds(f, f->num_kinds - 1, number);
    }
}

/* Joins the chain of a kind with the one that makes an argument of its calls, if both can run at
   once. */
static int join(struct fuse *f, const struct kind *reader, int32_t argument)
{
    const int32_t kind = kind_of_makers(f, reader, argument), to = reader->chain;
    if (kind < 0 || f->kinds[kind].chain == to || !f->sites->arguments[f->kinds[kind].signature])
        return 0;
    const int32_t from = f->kinds[kind].chain;
    const struct chain own = f->chains[to], other = f->chains[from];
    if (own.size + other.size > MOST_FUSED)
        return 0;
    const int32_t levels = count_levels(f, f->call_of + reader->first, reader->count);
    const int32_t other_levels = count_levels(f, f->moved, reader->count);
    if (levels > 2 * other_levels || other_levels > 2 * levels)
        return 0;

    move_instances(f, &other, own.count);
    append_kinds(f, from, to);
    note_first(f, f->chains + to);
    for (int32_t instance = 0; instance < own.count; instance++)
        if (!find_depth(f, f->chains + to, instance, NULL)) { /* undo */
            f->chains[to] = own;
            f->chains[from] = other;
            f->kinds[own.last].next = -1;
            for (int32_t each = other.first; each >= 0; each = f->kinds[each].next)
                f->kinds[each].chain = from;
            return 0;
        }

    if (other.count > own.count)
        split_off(f, other.first, own.count);
    return 1;
}

static void join_all(struct fuse *f)
{
    int any = 1;
    for (int pass = 0; any && pass < MOST_PASSES; pass++) {
        any = 0;
        for (int32_t each = f->num_kinds - 1; each >= 0; each--) {
            const struct kind *const kind = f->kinds + each;
            const int32_t arguments = kind->is_list ? 0 : f->sites->arguments[kind->signature];
            for (int32_t argument = arguments - 1; argument >= 0; argument--)
                any |= join(f, kind, argument);
        }
    }
}

/* The results. */

/* Sorts the kinds of a chain so that each comes after those that it reads. */
static void sort_kinds(struct fuse *f, struct chain *chain)
{
    int32_t kinds[MOST_FUSED] = {chain->first}, size = 0;
    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        const int32_t call = f->call_of[f->kinds[kind].first];
        int32_t at = size++;
        for (; at > 0 && f->call_of[f->kinds[kinds[at - 1]].first] > call; at--)
            kinds[at] = kinds[at - 1];
        kinds[at] = kind;
    }

    chain->first = kinds[0];
    chain->last = kinds[size - 1];
    for (int32_t node = 0; node < size; node++) {
        f->kinds[kinds[node]].node = node;
        f->kinds[kinds[node]].next = node + 1 < size ? kinds[node + 1] : -1;
    }
}

/* Finds when the instances of a chain are ready, for its first calls, and what others read. One of
   which nothing is read waits for all that its calls read. */
static void find_ready(struct fuse *f, const struct chain *chain)
{
    note_first(f, chain);
    for (int32_t instance = 0; instance < chain->count; instance++) {
        int32_t ready = find_depth(f, chain, instance, f->is_output), deepest = 0;
        for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
            const int32_t depth = f->depth[f->call_of[f->kinds[kind].first + instance]];
            deepest = depth > deepest ? depth : deepest;
        }
        ready = ready < INT32_MAX ? ready : deepest;
        f->ready[f->call_of[f->kinds[chain->first].first + instance]] = ready;
    }
}

/* Writes a chain: its number of nodes, its number of outputs, for each node its signature and what
   its arguments refer to, and for each output its node and which of the results it is. Returns its
   number, or that of an equal one. */
static int32_t write_chain(struct fuse *f, const struct chain *chain)
{
    const int32_t number = (int32_t)f->counts[0], results = (int32_t)f->sites->most_results;
    int32_t *const begin = f->chain + (number ? f->first_chain[number] : 0), *next = begin + 2;
    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        const struct kind *const k = f->kinds + kind;
        const int32_t call = f->call_of[k->first], first = f->graph.first_read[call];
        *next++ = k->signature;
        for (int32_t each = 0; each < f->sites->arguments[k->signature]; each++) {
            const int64_t refer = k->is_list ? -1 : refer_of(f, call, first + each);
            *next++ = refer < 0
                          ? -1
                          : f->kinds[refer / results].node * results + (int32_t)(refer % results);
        }
    }

    int32_t *const outputs = next;
    for (int32_t kind = chain->first; kind >= 0; kind = f->kinds[kind].next) {
        const int32_t call = f->call_of[f->kinds[kind].first];
        for (int32_t result = 0; result < results_of(f, call); result++)
            if (f->is_output[f->begin_of[call] + result]) {
                *next++ = f->kinds[kind].node;
                *next++ = result;
            }
    }
    begin[0] = chain->size;
    begin[1] = (int32_t)(next - outputs) / 2;

    const int32_t length = (int32_t)(next - begin);
    for (int32_t other = 0; other < number; other++)
        if (f->first_chain[other + 1] - f->first_chain[other] == length &&
            !memcmp(f->chain + f->first_chain[other], begin, length * sizeof *begin))
            return other;

    f->first_chain[number] = (int32_t)(begin - f->chain);
    f->first_chain[number + 1] = (int32_t)(next - f->chain);
    f->counts[0]++;
    if (begin[1] > f->counts[1])
        f->counts[1] = begin[1];
    return number;
}

/* Lists the first calls of instances in `moved`, each after those that it reads. Returns how many
   there are. */
static int32_t sort_instances(struct fuse *f)
{
    int32_t *const first = f->before, count = 0;
    memset(first, 0, (f->calls + 2) * sizeof *first);
    for (int32_t call = 0; call < f->calls; call++)
        if (!f->kinds[f->kind_of[call]].node) {
            first[f->ready[call] + 1]++;
            count++;
        }
    for (int64_t each = 0; each < f->calls; each++)
        first[each + 1] += first[each];

    for (int32_t call = 0; call < f->calls; call++)
        if (!f->kinds[f->kind_of[call]].node)
            f->moved[first[f->ready[call]]++] = call;
    return count;
}

/* Writes what instances consist of and read; returns how many there are. */
static int64_t write_instances(struct fuse *f)
{
    const struct graph *const g = &f->graph;
    const int32_t count = sort_instances(f);
    int32_t members = 0, reads = 0;
    for (int32_t each = 0; each < count; each++) {
        const int32_t own = f->moved[each], instance = f->instance[own];
        f->kind[each] = f->number[chain_of(f, own)];
        f->begin[each] = f->begin_of[own];
        f->first_member[each] = members;
        f->first_read[each] = reads;
        for (int32_t kind = f->kind_of[own]; kind >= 0; kind = f->kinds[kind].next) {
            const int32_t call = f->call_of[f->kinds[kind].first + instance];
            f->member[members++] = f->begin_of[call];
            for (int32_t read = g->first_read[call]; read < g->first_read[call + 1]; read++)
                if (refer_of(f, call, read) < 0)
                    f->read[reads++] = g->read[read];
        }
    }
    f->first_member[count] = members;
    f->first_read[count] = reads;

    for (int32_t each = 0; each < count; each++)
        for (int32_t at = f->first_member[each]; at < f->first_member[each + 1]; at++)
            for (int32_t result = 0; result < f->sites->results[f->code[f->member[at]]]; result++)
                f->call[f->member[at] + result] = each;
    return count;
}

/* Writes the chains that run several kinds, and numbers all. */
static void write_chains(struct fuse *f)
{
    f->counts[0] = 0;
    f->counts[1] = f->sites->most_results;
    for (int32_t each = 0; each < f->num_kinds; each++) {
        struct chain *const chain = f->chains + each;
        if (!chain->size)
            continue;
        sort_kinds(f, chain);
        find_ready(f, chain);
        f->number[each] = chain->size == 1 ? f->kinds[chain->first].signature
                                           : (int32_t)f->num_signatures + write_chain(f, chain);
    }
}

/* A copy of integers; NULL without memory. */
static int32_t *copied(struct arena *arena, const int32_t *integers, int64_t count)
{
    int32_t *const copy = new_array(arena, count, sizeof *copy);
    return copy ? memcpy(copy, integers, count * sizeof *copy) : NULL;
}

/* Makes room; -1 without memory. */
static int make_room(struct fuse *f)
{
    struct arena *const arena = &f->arena;
    int32_t **const of_calls[] = {&f->kind_of, &f->instance, &f->depth, &f->ready, &f->call_of,
                                  &f->level,   &f->before,   &f->moved, &f->seen,  &f->number};
    int64_t values = 0;
    for (int each = 0; each < COUNT(of_calls); each++)
        *of_calls[each] = new_array(arena, f->calls + 2, sizeof(int32_t));

    f->begin_of = copied(arena, f->begin, f->calls);
    for (int32_t call = 0; f->begin_of && call < f->calls; call++)
        if (f->begin_of[call] + results_of(f, call) > values)
            values = f->begin_of[call] + results_of(f, call);

    f->uses = new_array(arena, values, sizeof *f->uses);
    f->inside = new_array(arena, values, sizeof *f->inside);
    f->kinds = new_array(arena, f->calls, sizeof *f->kinds);
    f->chains = new_array(arena, f->calls, sizeof *f->chains);
    f->is_output = new_array(arena, values, sizeof *f->is_output);
    f->graph = (struct graph){.calls = f->calls,
                              .kind = f->kind_of,
                              .row = f->row,
                              .call = f->call,
                              .first_read = copied(arena, f->first_read, f->calls + 1),
                              .read = copied(arena, f->read, f->first_read[f->calls])};
    return arena->is_exhausted ? -1 : 0;
}

/* Returns the number of instances, or -1 without memory. */
static int64_t fuse(struct fuse *f)
{
    int64_t instances = -1;
    f->arena = (struct arena){0};
    if (!make_room(f) && !find_kinds(f) && !find_own_levels(f)) {
        count_uses(f);
        join_all(f);
        write_chains(f);
        instances = write_instances(f);
    }
    free_arena(&f->arena);
    return instances;
}

static const struct field fields_of_fuse[] = {
    FIELD(fuse, sites),          FIELD(fuse, code),         FIELD(fuse, calls),
    FIELD(fuse, num_signatures), FIELD(fuse, kept),         FIELD(fuse, place),
    FIELD(fuse, value),          FIELD(fuse, row),          FIELD(fuse, call),
    FIELD(fuse, begin),          FIELD(fuse, first_read),   FIELD(fuse, read),
    FIELD(fuse, kind),           FIELD(fuse, first_member), FIELD(fuse, member),
    FIELD(fuse, first_chain),    FIELD(fuse, chain),        FIELD(fuse, counts),
};

FUNCTION(fuse)

PyMethodDef fuse_functions[] = {
    METHOD(fuse, "Let calls that come together run in one step; return the number of instances."),
    {NULL, NULL, 0, NULL},
};
