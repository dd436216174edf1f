/* The plan of the atom pairs of molecules, for valid codes only; nn/pairs.py holds the
   definition. */

#include "arguments.h"
#include <stdlib.h>
#include <string.h>

struct pair_plan {
    int64_t molecules, codes, stored; /* stored: codes of all pairs of all molecules */
    const int64_t *sizes;             /* atoms of each molecule */
    const uint8_t *code;              /* of each stored pair */
    const uint8_t *kept;              /* whether pairs of a code are used, or none: all are */
    int64_t *counts;                  /* result without `plan`: atoms, pairs, entries */
    int32_t *plan;                    /* result: the parts that `_layout` lists, in its order */
};

/* Counts atoms, pairs and entries; returns INVALID if sizes and codes do not fit. */
static int64_t count_pairs(const struct pair_plan *p)
{
    const uint8_t *code = p->code;
    int64_t atoms = 0, stored = 0, pairs = 0, alone = 0;
    for (int64_t molecule = 0; molecule < p->molecules; molecule++) {
        const int64_t size = p->sizes[molecule];
        if (size < 0 || size > p->stored)
            return INVALID;
        atoms += size;
        stored += size * (size + 1) / 2;
        if (stored > p->stored || stored > INT32_MAX / 8)
            return INVALID;
        for (int64_t first = 0; first < size; first++)
            for (int64_t second = first; second < size; second++, code++) {
                if (*code >= p->codes)
                    return INVALID;
                const int64_t used = !p->kept || p->kept[*code];
                pairs += used;
                alone += used && first == second;
            }
    }
    p->counts[0] = atoms;
    p->counts[1] = pairs;
    p->counts[2] = 2 * pairs - alone;
    return stored == p->stored ? 0 : INVALID;
}

/* Turns numbers in lists, counted one place later, into where each list begins. */
static void add_up(int32_t *starts, int64_t lists)
{
    for (int64_t each = 0; each < lists; each++)
        starts[each + 1] += starts[each];
}

/* Undoes that each list's beginning has moved to its end while the list was filled. */
static void move_back(int32_t *starts, int64_t lists)
{
    memmove(starts + 1, starts, lists * sizeof *starts);
    starts[0] = 0;
}

static void fill_plan(const struct pair_plan *p)
{
    const int64_t atoms = p->counts[0], pairs = p->counts[1], entries = p->counts[2];
    int32_t *first = p->plan, *second = first + pairs, *code = second + pairs;
    int32_t *column = code + pairs, *ptr = column + pairs, *entry = ptr + atoms + 1;
    int32_t *other = entry + entries, *atom_ptr = other + entries;
    int32_t *end = atom_ptr + p->molecules + 1, *end_ptr = end + entries;
    int32_t *order = end_ptr + pairs + 1, *order_ptr = order + 2 * pairs;
    int32_t *code_count = order_ptr + atoms + 1, *code_order = code_count + atoms * p->codes;
    int32_t *code_ptr = code_order + pairs, number = 0, place = 0, begin = 0, stored = 0;
    memset(ptr, 0, (atoms + 1) * sizeof *ptr);
    memset(order_ptr, 0, (atoms + 1) * sizeof *order_ptr);
    memset(code_count, 0, atoms * p->codes * sizeof *code_count);
    memset(code_ptr, 0, (p->codes + 1) * sizeof *code_ptr);
    for (int64_t molecule = 0; molecule < p->molecules; molecule++) {
        const int32_t behind = begin + (int32_t)p->sizes[molecule];
        atom_ptr[molecule] = begin;
        for (int32_t i = begin; i < behind; i++)
            for (int32_t j = i; j < behind; j++, stored++) {
                const uint8_t found = p->code[stored];
                if (p->kept && !p->kept[found])
                    continue;
                first[number] = end[place] = i;
                second[number] = j;
                code[number] = found;
                column[number] = stored;
                end_ptr[number++] = place++;
                ptr[i + 1]++;
                order_ptr[i + 1]++;
                order_ptr[j + 1]++;
                code_count[i * p->codes + found]++;
                code_ptr[found + 1]++;
                if (i == j)
                    continue;
                end[place++] = j;
                ptr[j + 1]++;
                code_count[j * p->codes + found]++;
            }
        begin = behind;
    }
    atom_ptr[p->molecules] = begin;
    end_ptr[number] = place;
    add_up(ptr, atoms);
    add_up(order_ptr, atoms);
    add_up(code_ptr, p->codes);
    for (number = 0; number < pairs; number++) {
        const int32_t i = first[number], j = second[number];
        code_order[code_ptr[code[number]]++] = number;
        entry[ptr[j]] = number;
        other[ptr[j]++] = i;
        order[order_ptr[j]++] = number + (int32_t)pairs;
        order[order_ptr[i]++] = number;
        if (i == j)
            continue;
        entry[ptr[i]] = number;
        other[ptr[i]++] = j;
    }
    move_back(ptr, atoms);
    move_back(order_ptr, atoms);
    move_back(code_ptr, p->codes);
}

static const struct field fields_of_pair_plan[] = {
    FIELD(pair_plan, molecules), FIELD(pair_plan, codes), FIELD(pair_plan, stored),
    FIELD(pair_plan, sizes),     FIELD(pair_plan, code),  FIELD(pair_plan, kept),
    FIELD(pair_plan, counts),    FIELD(pair_plan, plan),
};

/* Counts pairs without `plan`, and writes it otherwise; returns INVALID if codes do not fit. */
static int64_t pair_plan(struct pair_plan *p)
{
    if (!p->plan)
        return count_pairs(p);
    fill_plan(p);
    return 0;
}

FUNCTION(pair_plan)

struct pair_codes {
    int64_t atoms, end;
    const uint8_t *bonds; /* [atom, atom]: the code of a bond, or 0 */
    const int64_t *rings; /* numbers up to `end`: of each ring its size, then its atoms */
    uint8_t *codes;       /* result, [atom, atom] */
};
static const struct field fields_of_pair_codes[] = {
    FIELD(pair_codes, atoms), FIELD(pair_codes, bonds), FIELD(pair_codes, rings),
    FIELD(pair_codes, end),   FIELD(pair_codes, codes),
};

/* As `coded_pairs` of molecules/features/kearnes.py, for one atom after another. */
static int64_t pair_codes(struct pair_codes *p)
{
    const int32_t atoms = (int32_t)p->atoms;
    int32_t ends = 0, *starts;
    for (int64_t pair = 0; pair < p->atoms * atoms; pair++)
        ends += p->bonds[pair] != 0;
    if (!(starts = calloc(3 * p->atoms + 1 + ends, sizeof *starts)))
        return -1;
    int32_t *found = starts + atoms + 1, *marked = found + atoms, *other = marked + atoms;
    for (int32_t i = 0, end = 0; i < atoms; starts[++i] = end)
        for (int32_t j = 0; j < atoms; j++)
            if (p->bonds[i * p->atoms + j])
                other[end++] = j;
    for (int32_t i = 0; i < atoms; i++) {
        uint8_t *codes = p->codes + i * p->atoms;
        memcpy(codes, p->bonds + i * p->atoms, atoms);
        found[0] = i;
        marked[i] = 2 * i + 1;
        for (int32_t next = 0, count = 1, behind = 1, far = 1; next < count; next++) {
            if (next == behind) { /* all atoms at a distance are found */
                behind = count;
                far += far < 8;
            }
            for (int32_t k = starts[found[next]]; k < starts[found[next] + 1]; k++)
                if (marked[other[k]] != 2 * i + 1) {
                    marked[found[count++] = other[k]] = 2 * i + 1;
                    codes[other[k]] = far > 1 ? 2 * far - 3 : codes[other[k]];
                }
        }
        for (int32_t j = 0; j < atoms; j++)
            codes[j] = marked[j] == 2 * i + 1 ? codes[j] : 15;
        marked[i] = 2 * i + 2;
        for (const int64_t *ring = p->rings, *last; ring < p->rings + p->end; ring = last + 1) {
            const int64_t *member = ring + 1;
            for (last = ring + *ring; member <= last && *member != i; member++) {}
            for (const int64_t *one = member <= last ? ring + 1 : last + 1; one <= last; one++)
                if (marked[*one] != 2 * i + 2) {
                    marked[*one] = 2 * i + 2;
                    codes[*one]++;
                }
        }
    }
    free(starts);
    return 0;
}

FUNCTION(pair_codes)

PyMethodDef pairs_functions[] = {
    METHOD(pair_plan, "Count the pairs of molecules, or write their plan; -2 if codes do not fit."),
    METHOD(pair_codes, "Codes of the pairs of a molecule from its bonds and rings."),
    {NULL, NULL, 0, NULL},
};
