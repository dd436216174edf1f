/* The calls of recordings. core/definitions.py says what these functions compute. `check` checks
   recordings, whoever wrote them; all other functions trust their arguments. */

#include "recordings.h"
#include "arena.h"
#include "graph.h"
#include "hash.h"
#include <string.h>

enum { UNUSED = -2 }; /* instead of the number of a call without arguments */

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
    int32_t *begins; /* result */
    int32_t *type;   /* result: the row type of each value; -1 if there is none */
    int64_t *left;   /* room: constants of each site without a record */
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
    if (kind == INPUT) {
        const int64_t inputs = c->num_inputs[example * c->types + type_of(s, site)];
        if (next == size || code[next] < 0 || code[next] >= inputs)
            return -1;
        next++;
    }
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
    struct arena arena = {0};
    int64_t records = 0;
    c->left = new_array(&arena, c->num_sites, sizeof *c->left);
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
    free_arena(&arena);
    return records;
}

/* Renumbers the records of examples that have been copied one after another. */
struct move {
    const struct sites *sites;
    int32_t *code;       /* also the result */
    const int64_t *ends; /* of the examples */
    int64_t examples, base;
    const int64_t *first_site;  /* of each example: what is added to its sites */
    const int64_t *first_input; /* its first input row of each row type, `types` per example */
    int64_t types;
};

/* Returns the number of records; `base` integers lie before the first example. A call that then
   reads a value with a negative number ends it: INVALID. */
static int64_t move(struct move *m)
{
    int32_t *code = m->code, *const all = m->code;
    int64_t records = 0;
    for (int64_t example = 0; example < m->examples; example++) {
        const int32_t base = (int32_t)(m->base + (code - all));
        for (const int32_t *last = all + m->ends[example]; code < last; records++) {
            code[0] += (int32_t)m->first_site[example];
            const int32_t site = code[0], signature = m->sites->signature[site];
            const int32_t *const end = end_of(m->sites, code), *next = code + 1;
            if (m->sites->kind[site] == INPUT)
                code[1] += (int32_t)m->first_input[example * m->types + type_of(m->sites, site)];
            else if (m->sites->kind[site] == CALL)
                for (int32_t each = 0; each < m->sites->arguments[signature]; each++)
                    for (int32_t left = values_of(m->sites, signature, each, &next); left > 0;
                         left--, next++) {
                        all[next - all] += base; /* `next` cannot be written to */
                        if (*next < 0)
                            return INVALID;
                    }
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

/* What merging counts: the calls that remain, what they read, how much of it as ragged arguments,
   and the calls that are left out. */
enum { CALLS, READS, RAGGED_READS, MERGED_CALLS, COUNTS };

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
    int64_t *counts;               /* result */
    /* Room. */
    int64_t *next_constant;  /* of each site: how many of its constants have had a record */
    int32_t *leader;         /* of each signature without arguments: its first record, or -1 */
    int32_t *constant_value; /* of each different constant: its first value, or -1 */
    uint8_t *fixed;          /* of each value: whether it depends on constants alone */
    int32_t *slots;          /* calls by their hash */
    int64_t mask;            /* one less than the number of slots */
};

static void number_call(struct merge *m, int32_t begin)
{
    for (int32_t slot = 0; slot < m->sites->results[m->code[begin]]; slot++)
        m->call[begin + slot] = (int32_t)m->counts[CALLS];
    m->begin[m->counts[CALLS]] = begin;
    m->first_read[m->counts[CALLS]] = (int32_t)m->counts[READS];
    m->counts[CALLS]++;
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
    int32_t *read = m->read + m->counts[READS];
    const int32_t *next = code + 1;
    for (int32_t each = 0; each < m->sites->arguments[signature]; each++) {
        int32_t left = values_of(m->sites, signature, each, &next);
        *ragged += is_ragged(m->sites, signature, each) ? left : 0;
        for (; left > 0; left--)
            *read++ = m->value[*next++];
    }
    return read - m->read - m->counts[READS];
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

/* An earlier call of the signature on the same values; if there is none, -1, and this one is noted
   under the number that it will get. */
static int32_t equal_call(struct merge *m, int32_t begin, int64_t reads)
{
    const int32_t signature = m->sites->signature[m->code[begin]];
    const int32_t *const own = m->read + m->counts[READS];
    uint64_t hash = FIRST_HASH ^ (uint32_t)signature;
    for (int64_t each = 0; each < reads; each++)
        hash = next_hash(hash, (uint32_t)own[each]);
    int64_t at = (int64_t)hash & m->mask;
    for (; m->slots[at] >= 0; at = (at + 1) & m->mask) {
        const int32_t call = m->slots[at], *const other = m->code + m->begin[call];
        if (m->sites->signature[*other] == signature &&
            equal_sizes(m->sites, m->code + begin, other) &&
            !memcmp(own, m->read + m->first_read[call], reads * sizeof *own))
            return call;
    }
    m->slots[at] = (int32_t)m->counts[CALLS];
    return -1;
}

/* The first call without arguments of a signature stands for all others. */
static void merge_call_without_arguments(struct merge *m, int32_t begin)
{
    const int32_t site = m->code[begin], signature = m->sites->signature[site];
    if (m->leader[signature] < 0)
        m->leader[signature] = begin;
    else
        m->counts[MERGED_CALLS]++;
    for (int32_t slot = 0; slot < m->sites->results[site]; slot++) {
        m->call[begin + slot] = UNUSED;
        m->fixed[begin + slot] = 1;
        m->value[begin + slot] = m->leader[signature] + slot;
    }
}

static void merge_call(struct merge *m, int32_t begin)
{
    const int32_t site = m->code[begin], signature = m->sites->signature[site];
    const int32_t results = m->sites->results[site];
    int64_t ragged = 0;
    if (!m->sites->arguments[signature]) {
        merge_call_without_arguments(m, begin);
        return;
    }

    const int64_t reads = list_reads(m, m->code + begin, &ragged);
    const int32_t *read = m->read + m->counts[READS];
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
            m->counts[MERGED_CALLS]++;
            return;
        }
    }

    number_call(m, begin);
    m->counts[READS] += reads;
    m->counts[RAGGED_READS] += ragged;
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
            m->row[begin] = m->code[begin + 1] + (int32_t)m->first_input[type_of(m->sites, site)];
        else
            merge_call(m, begin);
    }

    for (int64_t each = 0; each < m->num_outputs; each++)
        use(m, m->value[m->outputs[each]]);
    m->first_read[m->counts[CALLS]] = (int32_t)m->counts[READS];
}

/* Returns the number of calls that remain, or -1 without memory. */
static int64_t merge(struct merge *m)
{
    struct arena arena = {0};
    m->mask = (m->merge_equal ? table_size(m->records) : 1) - 1;
    m->next_constant = new_array(&arena, m->num_sites, sizeof *m->next_constant);
    m->fixed = new_array(&arena, m->size, sizeof *m->fixed);
    m->leader = new_array(&arena, m->num_signatures, sizeof *m->leader);
    m->constant_value = new_array(&arena, m->num_constants, sizeof *m->constant_value);
    m->slots = new_array(&arena, m->mask + 1, sizeof *m->slots);
    memset(m->counts, 0, COUNTS * sizeof *m->counts);
    if (!arena.is_exhausted) {
        memset(m->leader, -1, m->num_signatures * sizeof *m->leader);
        memset(m->constant_value, -1, m->num_constants * sizeof *m->constant_value);
        memset(m->slots, -1, (m->mask + 1) * sizeof *m->slots);
        merge_records(m);
    }
    free_arena(&arena);
    return arena.is_exhausted ? -1 : m->counts[CALLS];
}

/* Chooses calls that values depend on, and if `joins` calls of their sites that can run with
   them. */
struct choose {
    const struct sites *sites;
    const int32_t *code;
    int64_t calls, num_sites;
    const int32_t *begin, *first_read, *read, *row, *call; /* as `merge` leaves them */
    const int32_t *needed;                                 /* values */
    int64_t num_needed, joins;
    uint8_t *waits; /* result: of each call, whether it is not chosen */
    uint8_t *kept;  /* result: of each value, 1 if a call that waits reads it */
    /* Room. */
    struct graph graph; /* of the calls */
    int32_t *chosen;    /* calls whose reads are still to be chosen */
    int64_t num_chosen;
    uint8_t *is_called; /* of each site, whether one of its calls is chosen */
};

/* Chooses the call that makes a value, if it has not been chosen. */
static void choose_maker(struct choose *c, int32_t value)
{
    const int32_t maker = maker_of(&c->graph, value);
    if (maker < 0 || !c->waits[maker])
        return;
    c->waits[maker] = 0;
    c->chosen[c->num_chosen++] = maker;
}

/* Whether no call makes what a call reads. */
static int can_run(const struct choose *c, int64_t call)
{
    for (int32_t read = c->first_read[call]; read < c->first_read[call + 1]; read++)
        if (maker_of(&c->graph, c->read[read]) >= 0)
            return 0;
    return 1;
}

/* Returns how many calls wait. */
static int64_t choose_calls(struct choose *c)
{
    int64_t waiting = 0;
    memset(c->waits, 1, c->calls);
    for (int64_t each = 0; each < c->num_needed; each++)
        choose_maker(c, c->needed[each]);
    while (c->num_chosen) {
        const int32_t call = c->chosen[--c->num_chosen];
        c->is_called[c->code[c->begin[call]]] = 1;
        for (int32_t read = c->first_read[call]; read < c->first_read[call + 1]; read++)
            choose_maker(c, c->read[read]);
    }

    for (int64_t call = 0; call < c->calls; call++) {
        if (c->joins && c->waits[call] && c->is_called[c->code[c->begin[call]]] && can_run(c, call))
            c->waits[call] = 0;
        if (!c->waits[call])
            continue;
        waiting++;
        for (int32_t read = c->first_read[call]; read < c->first_read[call + 1]; read++)
            c->kept[c->read[read]] = 1;
    }
    return waiting;
}

/* Returns how many calls wait, or -1 without memory. */
static int64_t choose(struct choose *c)
{
    struct arena arena = {0};
    c->graph = (struct graph){.calls = c->calls,
                              .row = c->row,
                              .call = c->call,
                              .first_read = c->first_read,
                              .read = c->read};
    c->num_chosen = 0;
    c->chosen = new_array(&arena, c->calls, sizeof *c->chosen);
    c->is_called = new_array(&arena, c->num_sites, sizeof *c->is_called);
    const int64_t waiting = arena.is_exhausted ? -1 : choose_calls(c);
    free_arena(&arena);
    return waiting;
}

static uint64_t hash_of_bytes(const char *bytes, int64_t count)
{
    uint64_t hash = FIRST_HASH, word;
    int64_t byte = 0;
    for (; byte + 8 <= count; byte += 8) {
        memcpy(&word, bytes + byte, 8);
        hash = next_hash(hash, word);
    }
    for (; byte < count; byte++)
        hash = next_hash(hash, (unsigned char)bytes[byte]);
    return hash ^ hash >> 32;
}

int64_t distinct(struct distinct *d)
{
    struct arena arena = {0};
    const int64_t entries = table_size(d->count);
    int32_t *const slots = new_array(&arena, entries, sizeof *slots); /* numbers, counted from 1 */
    int32_t numbers = 0;
    for (int64_t each = 0; slots && each < d->count; each++) {
        const char *const row = d->rows + each * d->width;
        int64_t at = (int64_t)hash_of_bytes(row, d->width) & (entries - 1);
        while (slots[at] && memcmp(row, d->rows + d->first[slots[at] - 1] * d->width, d->width))
            at = (at + 1) & (entries - 1);
        if (!slots[at]) {
            d->first[numbers] = (int32_t)each;
            slots[at] = ++numbers;
        }
        d->number[each] = slots[at] - 1;
    }
    free_arena(&arena);
    return slots ? numbers : -1;
}

static const struct field fields_of_check[] = {
    FIELD(check, sites),          FIELD(check, code),          FIELD(check, ends),
    FIELD(check, examples),       FIELD(check, first_site),    FIELD(check, last_site),
    FIELD(check, num_sites),      FIELD(check, num_inputs),    FIELD(check, types),
    FIELD(check, constants),      FIELD(check, last_constant), FIELD(check, outputs),
    FIELD(check, output_example), FIELD(check, num_outputs),   FIELD(check, begins),
    FIELD(check, type),
};
static const struct field fields_of_move[] = {
    FIELD(move, sites), FIELD(move, code),       FIELD(move, ends),        FIELD(move, examples),
    FIELD(move, base),  FIELD(move, first_site), FIELD(move, first_input), FIELD(move, types),
};
static const struct field fields_of_scan[] = {
    FIELD(scan, sites), FIELD(scan, code),   FIELD(scan, first),
    FIELD(scan, size),  FIELD(scan, begins),
};
static const struct field fields_of_merge[] = {
    FIELD(merge, sites),
    FIELD(merge, code),
    FIELD(merge, size),
    FIELD(merge, num_sites),
    FIELD(merge, num_signatures),
    FIELD(merge, begins),
    FIELD(merge, records),
    FIELD(merge, outputs),
    FIELD(merge, num_outputs),
    FIELD(merge, merge_equal),
    FIELD(merge, first_constant),
    FIELD(merge, constant),
    FIELD(merge, constant_row),
    FIELD(merge, num_constants),
    FIELD(merge, first_input),
    FIELD(merge, value),
    FIELD(merge, row),
    FIELD(merge, call),
    FIELD(merge, owner),
    FIELD(merge, begin),
    FIELD(merge, first_read),
    FIELD(merge, read),
    FIELD(merge, counts),
};
static const struct field fields_of_choose[] = {
    FIELD(choose, sites),     FIELD(choose, code),       FIELD(choose, calls),
    FIELD(choose, num_sites), FIELD(choose, begin),      FIELD(choose, first_read),
    FIELD(choose, read),      FIELD(choose, row),        FIELD(choose, call),
    FIELD(choose, needed),    FIELD(choose, num_needed), FIELD(choose, joins),
    FIELD(choose, waits),     FIELD(choose, kept),
};
static const struct field fields_of_distinct[] = {
    FIELD(distinct, rows),   FIELD(distinct, count), FIELD(distinct, width),
    FIELD(distinct, number), FIELD(distinct, first),
};

FUNCTION(check)
FUNCTION(move)
FUNCTION(scan)
FUNCTION(merge)
FUNCTION(choose)
FUNCTION(distinct)

PyMethodDef recordings_functions[] = {
    METHOD(check, "Check records; list where they begin, and return their number or -2."),
    METHOD(move, "Renumber records that have been copied; return their number."),
    METHOD(scan, "List where records begin; return their number."),
    METHOD(merge, "Merge equal calls; return the number of the others."),
    METHOD(choose, "Choose the calls that values depend on; return how many others wait."),
    METHOD(distinct, "Number different rows; return how many there are."),
    {NULL, NULL, 0, NULL},
};
