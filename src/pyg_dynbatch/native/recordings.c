/* The steps of recorded calls. core/recording.py tells what the integers of a recording mean;
   core/definitions.py says what these functions compute. `check` checks recordings, whoever wrote
   them; all other functions trust their arguments. */

#include "arguments.h"
#include <stdlib.h>
#include <string.h>

enum { CONSTANT, INPUT, CALL };
enum { UNUSED = -2 }; /* instead of the number of a call without arguments */
enum { INVALID = -2 }; /* what `check` returns; the definition says what is wrong */

/* What records name by number; there are at most `most_results` results of a site and
   `most_arguments` of a signature. */
struct sites {
    const int32_t *kind, *signature, *results, *type; /* of each site, and type of each result */
    const int32_t *arguments, *is_ragged, *mergeable; /* of each signature, and each argument */
    const int32_t *argument_type;
    int64_t most_results, most_arguments;
};

static int is_ragged(const struct sites *s, int32_t signature, int32_t argument)
{
    return s->is_ragged[signature * s->most_arguments + argument];
}

/* How many values the next argument of a call has, after their number if it is ragged. */
static int32_t values_of(const struct sites *s, int32_t signature, int32_t argument,
                         const int32_t **next)
{
    return is_ragged(s, signature, argument) ? *(*next)++ : 1;
}

/* Where the record ends that begins at `code`. */
static const int32_t *end_of(const struct sites *s, const int32_t *code)
{
    const int32_t site = code[0], signature = s->signature[site], *next = code + 1;
    if (s->kind[site] == INPUT)
        return code + 2;
    for (int32_t each = 0; s->kind[site] == CALL && each < s->arguments[signature]; each++) {
        const int32_t values = values_of(s, signature, each, &next);
        next += values;
    }
    return next < code + s->results[site] ? code + s->results[site] : next;
}

/* The row type of the first result of a site. */
static int32_t type_of(const struct sites *s, int32_t site)
{
    return s->type[site * s->most_results];
}

/* Checks the records of examples that have been copied one after another, and lists where they
   begin. */
struct check {
    const struct sites *sites;
    const int32_t *code;
    const int64_t *ends; /* of the examples */
    int64_t examples;
    const int64_t *first_site, *last_site; /* the sites of each example; it counts its own from 0 */
    int64_t num_sites;
    const int64_t *num_inputs; /* of each row type, `types` per example */
    int64_t types;
    const int64_t *constants;     /* pairs: a site, counted like those of records, and its rows */
    const int64_t *last_constant; /* of each example: where its pairs end */
    const int32_t *outputs;       /* values, as their examples number them */
    const int64_t *output_example;
    int64_t num_outputs;
    int32_t *begins;              /* result */
    int32_t *type;                /* result: the row type of each value; -1 if there is none */
    int64_t *left;                /* Room: constants of each site without a record */
};

/* Where the record at `begin` of an example ends, or -1 if it is invalid. */
static int64_t checked_end(const struct check *c, int64_t example, const int32_t *code,
                           const int32_t *type, int64_t begin, int64_t size)
{
    const struct sites *s = c->sites;
    const int64_t site = c->first_site[example] + code[begin];
    if (code[begin] < 0 || site >= c->last_site[example])
        return -1;
    const int32_t signature = s->signature[site], kind = s->kind[site];
    int64_t next = begin + 1;
    if (kind == CONSTANT && --c->left[site] < 0)
        return -1;
    if (kind == INPUT && (next == size || code[next] < 0 ||
                          code[next++] >= c->num_inputs[example * c->types + type_of(s, site)]))
        return -1;
    for (int32_t each = 0; kind == CALL && each < s->arguments[signature]; each++) {
        const int64_t ragged = is_ragged(s, signature, each);
        if (ragged && next == size)
            return -1;
        int64_t values = ragged ? code[next++] : 1;
        if (values < 0 || values > size - next)
            return -1;
        for (; values > 0; values--, next++)
            if (code[next] < 0 || code[next] >= begin ||
                type[code[next]] != s->argument_type[signature * s->most_arguments + each])
                return -1;
    }
    if (next < begin + s->results[site])
        next = begin + s->results[site];
    return next <= size ? next : -1;
}

/* Checks one example after `records` records of others; returns their number, or INVALID. */
static int64_t check_example(struct check *c, int64_t example, int64_t records)
{
    const struct sites *s = c->sites;
    const int64_t first = example ? c->ends[example - 1] : 0, size = c->ends[example] - first;
    const int64_t pair = example ? c->last_constant[example - 1] : 0;
    const int64_t pairs = c->last_constant[example] - pair, *given = c->constants + 2 * pair;
    const int64_t first_site = c->first_site[example];
    int32_t *const type = c->type + first;
    for (int64_t each = 0; each < pairs; each++) {
        const int64_t site = first_site + given[2 * each];
        if (given[2 * each] < 0 || site >= c->last_site[example] || s->kind[site] != CONSTANT)
            return INVALID;
        c->left[site] = given[2 * each + 1];
    }
    for (int64_t begin = 0, end; begin < size; begin = end) {
        end = checked_end(c, example, c->code + first, type, begin, size);
        if (end < 0)
            return INVALID;
        const int64_t site = first_site + c->code[first + begin];
        for (int64_t slot = 0; slot < end - begin; slot++)
            type[begin + slot] =
                slot < s->results[site] ? s->type[site * s->most_results + slot] : -1;
        c->begins[records++] = (int32_t)(first + begin);
    }
    for (int64_t each = 0; each < pairs; each++)
        if (c->left[first_site + given[2 * each]])
            return INVALID;
    return records;
}

/* Returns the number of records, INVALID, or -1 without memory. */
static int64_t check(struct check *c)
{
    int64_t records = 0;
    c->left = calloc(c->num_sites + 1, sizeof *c->left);
    if (!c->left)
        return -1;
    for (int64_t example = 0; records >= 0 && example < c->examples; example++)
        records = check_example(c, example, records);
    for (int64_t each = 0; records >= 0 && each < c->num_outputs; each++) {
        const int64_t example = c->output_example[each];
        const int64_t first = example ? c->ends[example - 1] : 0, value = c->outputs[each];
        if (value < 0 || value >= c->ends[example] - first || c->type[first + value] < 0)
            records = INVALID;
    }
    free(c->left);
    return records;
}

/* Renumbers the records of examples that have been copied one after another. */
struct move {
    const struct sites *sites;
    int32_t *code;       /* also the result */
    const int64_t *ends; /* of the examples */
    int64_t examples, base;
    const int64_t *first_site; /* of each example: what is added to its sites */
    const int64_t *first_input; /* its first input row of each row type, `types` per example */
    int64_t types;
};

/* Returns the number of records; `base` integers lie before the first example. */
static int64_t move(struct move *m)
{
    int32_t *code = m->code, *const all = m->code;
    int64_t records = 0;
    for (int64_t example = 0; example < m->examples; example++) {
        const int32_t base = (int32_t)(m->base + (code - all));
        for (const int32_t *last = all + m->ends[example]; code < last; records++) {
            const int32_t site = code[0] += (int32_t)m->first_site[example];
            const int32_t signature = m->sites->signature[site];
            const int32_t *const end = end_of(m->sites, code), *next = code + 1;
            if (m->sites->kind[site] == INPUT)
                code[1] += (int32_t)m->first_input[example * m->types + type_of(m->sites, site)];
            else if (m->sites->kind[site] == CALL)
                for (int32_t each = 0; each < m->sites->arguments[signature]; each++)
                    for (int32_t left = values_of(m->sites, signature, each, &next); left > 0; left--)
                        all[next++ - all] += base;
            code += end - code;
        }
    }
    return records;
}

/* Lists where records begin. */
struct scan {
    const struct sites *sites;
    const int32_t *code;
    int64_t first, size;
    int32_t *begins; /* result */
};

static int64_t scan(struct scan *given)
{
    const int32_t *code = given->code + given->first;
    int64_t records = 0;
    for (; code < given->code + given->size; records++) {
        given->begins[records] = (int32_t)(code - given->code);
        code = end_of(given->sites, code);
    }
    return records;
}

/* Merges equal calls, and numbers the others. */
struct merge {
    const struct sites *sites;
    const int32_t *code;
    int64_t size, num_sites, num_signatures;
    const int32_t *begins; /* of records, in their order */
    int64_t records;
    const int32_t *outputs; /* values that are read at the end */
    int64_t num_outputs, merge_equal;
    const int64_t *first_constant; /* of each site, in `constant` */
    const int32_t *constant;       /* for each constant, which of the different ones it is */
    const int32_t *constant_row;   /* row of each of the different ones */
    int64_t num_constants;         /* of the different ones */
    const int64_t *first_input;    /* row of the first input of each row type */
    int32_t *value;                /* result: for each value, the equal one that replaces it */
    int32_t *row;                  /* of each value; result: also those of constants and inputs */
    int32_t *call;                 /* result: the number of the call that makes each value */
    int32_t *owner;                /* result: where the record of each value begins */
    int32_t *begin, *first_read;   /* result: of each call; first_read has one entry more */
    int32_t *read;                 /* result: the values that calls read */
    int64_t *counts;               /* result: calls, reads, ragged reads, merged calls */
    /* Room: for each site, signature, value, different constant; calls by their hash. */
    int64_t *next_constant;
    int32_t *leader, *constant_value, *slots;
    uint8_t *fixed; /* whether a value depends on constants alone */
    int64_t mask;
};

static void number_call(struct merge *m, int32_t begin)
{
    for (int32_t slot = 0; slot < m->sites->results[m->code[begin]]; slot++)
        m->call[begin + slot] = (int32_t)m->counts[0];
    m->begin[m->counts[0]] = begin;
    m->first_read[m->counts[0]++] = (int32_t)m->counts[1];
}

/* Calls without arguments are made for the whole batch, when their result is first read. */
static void use(struct merge *m, int32_t value)
{
    if (m->row[value] < 0 && m->call[value] == UNUSED)
        number_call(m, m->owner[value]);
}

/* Lists the values that a call reads after those of earlier calls; returns their number. */
static int64_t list_reads(struct merge *m, const int32_t *code, int64_t *ragged)
{
    const int32_t signature = m->sites->signature[code[0]];
    int32_t *read = m->read + m->counts[1];
    const int32_t *next = code + 1;
    for (int32_t each = 0; each < m->sites->arguments[signature]; each++) {
        int32_t left = values_of(m->sites, signature, each, &next);
        *ragged += is_ragged(m->sites, signature, each) ? left : 0;
        for (; left > 0; left--)
            *read++ = m->value[*next++];
    }
    return read - m->read - m->counts[1];
}

/* Whether the ragged arguments of two calls of a signature have the same numbers of values. */
static int equal_sizes(const struct sites *s, const int32_t *one, const int32_t *other)
{
    const int32_t signature = s->signature[*one++];
    other++;
    for (int32_t each = 0; each < s->arguments[signature]; each++) {
        const int32_t values = values_of(s, signature, each, &one);
        if (values != values_of(s, signature, each, &other))
            return 0;
        one += values;
        other += values;
    }
    return 1;
}

/* An earlier call of the signature on the same values; -1 if there is none, which is noted. */
static int32_t equal_call(struct merge *m, int32_t begin, int64_t reads)
{
    const int32_t signature = m->sites->signature[m->code[begin]];
    const int32_t *mine = m->read + m->counts[1];
    uint64_t hash = 1469598103934665603u ^ (uint32_t)signature;
    for (int64_t each = 0; each < reads; each++) {
        hash = (hash ^ (uint32_t)mine[each]) * 1099511628211u;
        hash ^= hash >> 29;
    }
    for (int64_t at = (int64_t)(hash & (uint64_t)m->mask);; at = (at + 1) & m->mask) {
        const int32_t found = m->slots[at];
        if (found < 0) {
            m->slots[at] = (int32_t)m->counts[0];
            return -1;
        }
        const int32_t *const other = m->code + m->begin[found];
        if (m->sites->signature[*other] == signature &&
            equal_sizes(m->sites, m->code + begin, other) &&
            !memcmp(mine, m->read + m->first_read[found], reads * sizeof *mine))
            return found;
    }
}

static void merge_call(struct merge *m, int32_t begin)
{
    const int32_t site = m->code[begin], signature = m->sites->signature[site];
    const int32_t results = m->sites->results[site];
    int64_t ragged = 0;
    if (!m->sites->arguments[signature]) {
        const int32_t leader = m->leader[signature];
        m->leader[signature] = leader < 0 ? begin : leader;
        m->counts[3] += leader >= 0;
        for (int32_t slot = 0; slot < results; slot++) {
            m->call[begin + slot] = UNUSED;
            m->fixed[begin + slot] = 1;
            m->value[begin + slot] = m->leader[signature] + slot;
        }
        return;
    }
    const int64_t reads = list_reads(m, m->code + begin, &ragged);
    const int32_t *read = m->read + m->counts[1];
    int fixed = m->merge_equal && m->sites->mergeable[signature];
    for (int64_t each = 0; fixed && each < reads; each++)
        fixed = m->fixed[read[each]];
    for (int64_t each = 0; each < reads; each++)
        use(m, read[each]);
    if (fixed) {
        const int32_t equal = equal_call(m, begin, reads);
        for (int32_t slot = 0; slot < results; slot++) {
            m->fixed[begin + slot] = 1;
            if (equal >= 0)
                m->value[begin + slot] = m->begin[equal] + slot;
        }
        if (equal >= 0) {
            m->counts[3]++;
            return;
        }
    }
    number_call(m, begin);
    m->counts[1] += reads;
    m->counts[2] += ragged;
}

static void merge_records(struct merge *m)
{
    for (int64_t record = 0; record < m->records; record++) {
        const int32_t begin = m->begins[record], site = m->code[begin];
        for (int32_t slot = 0; slot < m->sites->results[site]; slot++) {
            m->value[begin + slot] = begin + slot;
            m->owner[begin + slot] = begin;
            m->fixed[begin + slot] = m->sites->kind[site] == CONSTANT;
            m->row[begin + slot] = -1;
        }
        if (m->sites->kind[site] == CONSTANT) {
            const int64_t place = m->first_constant[site] + m->next_constant[site]++;
            const int32_t constant = m->constant[place];
            if (m->constant_value[constant] < 0)
                m->constant_value[constant] = begin;
            m->value[begin] = m->constant_value[constant];
            m->row[begin] = m->constant_row[constant];
        } else if (m->sites->kind[site] == INPUT)
            m->row[begin] =
                m->code[begin + 1] + (int32_t)m->first_input[type_of(m->sites, site)];
        else
            merge_call(m, begin);
    }
    for (int64_t each = 0; each < m->num_outputs; each++)
        use(m, m->value[m->outputs[each]]);
    m->first_read[m->counts[0]] = (int32_t)m->counts[1];
}

/* Returns the number of calls that remain, or -1 without memory. */
static int64_t merge(struct merge *m)
{
    int64_t entries = 16;
    while (m->merge_equal && entries < 2 * m->records)
        entries *= 2;
    m->mask = entries - 1;
    m->next_constant = calloc(m->num_sites + 1, sizeof *m->next_constant);
    m->fixed = malloc(m->size + 1);
    const int64_t numbers = m->num_signatures + m->num_constants + entries;
    m->leader = malloc(numbers * sizeof *m->leader);
    memset(m->counts, 0, 4 * sizeof *m->counts);
    const int has_room = m->next_constant && m->fixed && m->leader;
    if (has_room) {
        memset(m->leader, -1, numbers * sizeof *m->leader);
        m->constant_value = m->leader + m->num_signatures;
        m->slots = m->constant_value + m->num_constants;
        merge_records(m);
    }
    free(m->next_constant);
    free(m->fixed);
    free(m->leader);
    return has_room ? m->counts[0] : -1;
}

/* Assigns calls to steps. Kinds of calls that depend on each other form a group, and groups run one
   after the other; within a group, calls go by depth, or by the agenda where that is as short. */
struct order {
    int64_t calls, kinds, agenda;
    const int32_t *kind;      /* of each call */
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

/* Numbers the groups in topological order; returns how many there are. */
static int32_t find_groups(struct order *o)
{
    int32_t *ancestors = o->number, *leader = o->left, groups = 0;
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
        for (end = first; end < last && o->depth[o->sorted[end]] == o->depth[o->sorted[first]]; end++)
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
        for (int64_t kind = 0; kind < kinds; kind++)
            o->reach[kind * o->words + kind / 64] |= (uint64_t)1 << kind % 64;
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

/* Gives the results of every step rows, and lists the rows that it reads. */
struct place {
    const struct sites *sites;
    const int32_t *code;
    int64_t calls, steps;
    const int32_t *begin, *first_read, *read, *step;
    int32_t *row;    /* of each value; result: also those of results */
    int64_t *free;   /* the first free row of each row type; result: after all results */
    int64_t *index;  /* result: row numbers, argument by argument */
    int64_t *call;   /* result: for each step its signature and number of calls, for each of its
                        results the first row */
    int64_t *slices; /* result: for each argument of each step its begin in `index`, its length, its
                        first row if they are contiguous or -1, and the begin of the calls or -1 */
};

/* The first of rows that are contiguous, 0 if there are none, or -1. */
static int64_t first_row(const int64_t *rows, int64_t count)
{
    for (int64_t each = 1; each < count; each++)
        if (rows[each] != rows[0] + each)
            return -1;
    return count ? rows[0] : 0;
}

/* The steps, their results, and the lengths of what they read; returns the number of slices. */
static int64_t place_results(struct place *p, int32_t *position, int32_t *site_of, int64_t *first)
{
    const struct sites *s = p->sites;
    const int64_t width = 2 + s->most_results;
    int64_t slices = 0;
    memset(p->call, 0, p->steps * width * sizeof *p->call);
    for (int64_t call = 0; call < p->calls; call++) {
        int64_t *step = p->call + p->step[call] * width;
        const int32_t site = site_of[p->step[call]] = p->code[p->begin[call]];
        step[0] = s->signature[site];
        position[call] = (int32_t)step[1]++;
    }
    for (int64_t each = 0; each < p->steps; each++) {
        int64_t *step = p->call + each * width;
        const int32_t site = site_of[each], signature = (int32_t)step[0];
        for (int32_t slot = 0; slot < s->results[site]; slot++) {
            int64_t *free_row = p->free + s->type[site * s->most_results + slot];
            step[2 + slot] = *free_row;
            *free_row += step[1];
        }
        first[each] = slices;
        for (int32_t argument = 0; argument < s->arguments[signature]; argument++)
            p->slices[4 * slices++ + 1] = is_ragged(s, signature, argument) ? 0 : step[1];
    }
    for (int64_t call = 0; call < p->calls; call++) {
        const int64_t *step = p->call + p->step[call] * width;
        const int32_t begin = p->begin[call], site = p->code[begin], signature = (int32_t)step[0];
        const int32_t *next = p->code + begin + 1;
        for (int32_t slot = 0; slot < s->results[site]; slot++)
            p->row[begin + slot] = (int32_t)step[2 + slot] + position[call];
        for (int32_t argument = 0; argument < s->arguments[signature]; argument++) {
            const int32_t values = values_of(s, signature, argument, &next);
            if (is_ragged(s, signature, argument))
                p->slices[4 * (first[p->step[call]] + argument) + 1] += values;
            next += values;
        }
    }
    return slices;
}

/* Writes the rows that one call reads; slice[2] is where the rows of its next call go. */
static void place_reads(struct place *p, int64_t call, int32_t position, int64_t *slices)
{
    const struct sites *s = p->sites;
    const int32_t *code = p->code + p->begin[call], signature = s->signature[code[0]];
    const int32_t *next = code + 1, *read = p->read + p->first_read[call];
    for (int32_t argument = 0; argument < s->arguments[signature]; argument++) {
        int64_t *slice = slices + 4 * argument;
        const int32_t values = values_of(s, signature, argument, &next);
        for (int32_t each = 0; each < values; each++) {
            if (slice[3] >= 0)
                p->index[slice[3] + slice[2] - slice[0]] = position;
            p->index[slice[2]++] = p->row[*read++];
        }
        next += values;
    }
}

/* Returns the number of slices, or -1 without memory. */
static int64_t place(struct place *p)
{
    const struct sites *s = p->sites;
    int64_t slices = -1, entry = 0, *const first = malloc((p->steps + 1) * sizeof *first);
    int32_t *const position = malloc((p->calls + p->steps + 1) * sizeof *position);
    if (first && position) {
        int32_t *site_of = position + p->calls;
        slices = place_results(p, position, site_of, first);
        for (int64_t each = 0, slice = 0; each < p->steps; each++) {
            const int32_t signature = s->signature[site_of[each]];
            for (int32_t argument = 0; argument < s->arguments[signature]; argument++) {
                int64_t *mine = p->slices + 4 * slice++;
                mine[0] = mine[2] = entry;
                entry += mine[1];
                mine[3] = is_ragged(s, signature, argument) ? entry : -1;
                entry += is_ragged(s, signature, argument) ? mine[1] : 0;
            }
        }
        for (int64_t call = 0; call < p->calls; call++)
            place_reads(p, call, position[call], p->slices + 4 * first[p->step[call]]);
        for (int64_t slice = 0; slice < slices; slice++) {
            int64_t *mine = p->slices + 4 * slice;
            mine[2] = first_row(p->index + mine[0], mine[1]);
        }
    }
    free(first);
    free(position);
    return slices;
}

/* Numbers the different ones of rows of `width` bytes in the order in which they appear. */
struct distinct {
    const char *rows;
    int64_t count, width;
    int32_t *number; /* result: of each row */
    int32_t *first;  /* result: the first row of each number */
};

static int64_t distinct(struct distinct *d)
{
    int64_t found = 0, entries = 16;
    while (entries < 2 * d->count)
        entries *= 2;
    int32_t *const slots = malloc(entries * sizeof *slots);
    if (!slots)
        return -1;
    memset(slots, -1, entries * sizeof *slots);
    for (int64_t each = 0; each < d->count; each++) {
        const char *row = d->rows + each * d->width;
        uint64_t hash = 1469598103934665603u, word;
        int64_t byte = 0;
        for (; byte + 8 <= d->width; byte += 8) {
            memcpy(&word, row + byte, 8);
            hash = (hash ^ word) * 1099511628211u;
            hash ^= hash >> 29;
        }
        for (; byte < d->width; byte++)
            hash = (hash ^ (unsigned char)row[byte]) * 1099511628211u;
        hash ^= hash >> 32;
        for (int64_t at = (int64_t)(hash & (uint64_t)(entries - 1));; at = (at + 1) & (entries - 1)) {
            if (slots[at] < 0) {
                slots[at] = (int32_t)found;
                d->first[found++] = (int32_t)each;
            } else if (memcmp(row, d->rows + d->first[slots[at]] * d->width, d->width))
                continue;
            d->number[each] = slots[at];
            break;
        }
    }
    free(slots);
    return found;
}

static const struct field fields_of_check[] = {
    FIELD(check, sites), FIELD(check, code), FIELD(check, ends), FIELD(check, examples),
    FIELD(check, first_site), FIELD(check, last_site), FIELD(check, num_sites),
    FIELD(check, num_inputs), FIELD(check, types), FIELD(check, constants),
    FIELD(check, last_constant), FIELD(check, outputs), FIELD(check, output_example),
    FIELD(check, num_outputs), FIELD(check, begins), FIELD(check, type),
};
static const struct field fields_of_move[] = {
    FIELD(move, sites), FIELD(move, code), FIELD(move, ends), FIELD(move, examples),
    FIELD(move, base), FIELD(move, first_site), FIELD(move, first_input), FIELD(move, types),
};
static const struct field fields_of_scan[] = {
    FIELD(scan, sites), FIELD(scan, code), FIELD(scan, first), FIELD(scan, size),
    FIELD(scan, begins),
};
static const struct field fields_of_merge[] = {
    FIELD(merge, sites), FIELD(merge, code), FIELD(merge, size), FIELD(merge, num_sites),
    FIELD(merge, num_signatures), FIELD(merge, begins), FIELD(merge, records),
    FIELD(merge, outputs), FIELD(merge, num_outputs), FIELD(merge, merge_equal),
    FIELD(merge, first_constant), FIELD(merge, constant), FIELD(merge, constant_row),
    FIELD(merge, num_constants), FIELD(merge, first_input), FIELD(merge, value),
    FIELD(merge, row), FIELD(merge, call), FIELD(merge, owner), FIELD(merge, begin),
    FIELD(merge, first_read), FIELD(merge, read), FIELD(merge, counts),
};
static const struct field fields_of_order[] = {
    FIELD(order, calls), FIELD(order, kinds), FIELD(order, agenda), FIELD(order, kind),
    FIELD(order, row), FIELD(order, call), FIELD(order, first_read), FIELD(order, read),
    FIELD(order, step),
};
static const struct field fields_of_place[] = {
    FIELD(place, sites), FIELD(place, code), FIELD(place, calls), FIELD(place, steps),
    FIELD(place, begin), FIELD(place, first_read), FIELD(place, read), FIELD(place, step),
    FIELD(place, row), FIELD(place, free), FIELD(place, index), FIELD(place, call),
    FIELD(place, slices),
};

static const struct field fields_of_distinct[] = {
    FIELD(distinct, rows), FIELD(distinct, count), FIELD(distinct, width),
    FIELD(distinct, number), FIELD(distinct, first),
};

#define FUNCTION(name)                                                                             \
    static PyObject *native_##name(PyObject *module, PyObject *const *args, Py_ssize_t count,      \
                                   PyObject *names)                                                \
    {                                                                                              \
        struct name given;                                                                         \
        memset(&given, 0, sizeof given);                                                           \
        if (read_fields(fields_of_##name, COUNT(fields_of_##name), args, count, names, &given))    \
            return NULL;                                                                           \
        PyThreadState *state = PyEval_SaveThread();                                                \
        const int64_t found = name(&given);                                                        \
        PyEval_RestoreThread(state);                                                               \
        return found == -1 ? PyErr_NoMemory() : PyLong_FromLongLong(found);                          \
    }
FUNCTION(check)
FUNCTION(move)
FUNCTION(scan)
FUNCTION(merge)
FUNCTION(order)
FUNCTION(place)
FUNCTION(distinct)

#define METHOD(name, does)                                                                         \
    {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL | METH_KEYWORDS, does}
PyMethodDef recordings_functions[] = {
    METHOD(check, "Check records; list where they begin, and return their number or -2."),
    METHOD(move, "Renumber records that have been copied; return their number."),
    METHOD(scan, "List where records begin; return their number."),
    METHOD(merge, "Merge equal calls; return the number of the others."),
    METHOD(order, "Assign calls to steps; return the number of steps."),
    METHOD(place, "List the rows that steps read and write; return the number of slices."),
    METHOD(distinct, "Number different rows; return how many there are."),
    {NULL, NULL, 0, NULL},
};
