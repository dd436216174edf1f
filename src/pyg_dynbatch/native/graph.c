/* Groups of kinds of calls, and levels of calls: see graph.h. */

#include "graph.h"
#include "arena.h"

/* A matrix of bits: which kinds depend on which. */
struct reach {
    int64_t kinds, words; /* per row */
    uint64_t *bits;
};

static int reaches(const struct reach *r, int64_t from, int64_t to)
{
    return r->bits[from * r->words + to / 64] >> to % 64 & 1;
}

static void note_reach(struct reach *r, int64_t from, int64_t to)
{
    r->bits[from * r->words + to / 64] |= (uint64_t)1 << to % 64;
}

/* Finds which kinds depend on which; each reaches itself. */
static void find_reach(const struct graph *g, struct reach *r)
{
    for (int64_t kind = 0; kind < r->kinds; kind++)
        note_reach(r, kind, kind);
    for (int64_t call = 0; call < g->calls; call++)
        for (int32_t read = g->first_read[call]; read < g->first_read[call + 1]; read++) {
            const int32_t maker = maker_of(g, g->read[read]);
            if (maker >= 0)
                note_reach(r, g->kind[maker], g->kind[call]);
        }
    for (int64_t middle = 0; middle < r->kinds; middle++)
        for (int64_t from = 0; from < r->kinds; from++)
            if (from != middle && reaches(r, from, middle))
                for (int64_t word = 0; word < r->words; word++)
                    r->bits[from * r->words + word] |= r->bits[middle * r->words + word];
}

/* A group comes after those that reach it: fewer ancestors first, then by number. `leader` and
   `ancestors` have room for a number per kind. */
static int64_t number_groups(const struct reach *r, int32_t *leader, int32_t *ancestors,
                             int32_t *group_of_kind)
{
    int64_t groups = 0;
    for (int64_t kind = 0; kind < r->kinds; kind++) {
        leader[kind] = (int32_t)kind;
        group_of_kind[kind] = -1;
        for (int64_t from = r->kinds - 1; from >= 0; from--)
            if (from != kind && reaches(r, from, kind)) {
                ancestors[kind]++;
                if (from < leader[kind] && reaches(r, kind, from))
                    leader[kind] = (int32_t)from;
            }
    }
    for (;; groups++) {
        int64_t best = -1;
        for (int64_t kind = 0; kind < r->kinds; kind++)
            if (group_of_kind[kind] < 0 && leader[kind] == kind &&
                (best < 0 || ancestors[kind] < ancestors[best]))
                best = kind;
        if (best < 0)
            return groups;
        for (int64_t kind = 0; kind < r->kinds; kind++)
            if (leader[kind] == best)
                group_of_kind[kind] = (int32_t)groups;
    }
}

int64_t find_groups(const struct graph *g, int32_t *group_of_kind)
{
    struct arena arena = {0};
    struct reach reach = {.kinds = g->kinds, .words = (g->kinds + 63) / 64};
    int64_t groups = -1;
    reach.bits = new_array(&arena, reach.kinds * reach.words, sizeof *reach.bits);
    int32_t *const leader = new_array(&arena, g->kinds, sizeof *leader);
    int32_t *const ancestors = new_array(&arena, g->kinds, sizeof *ancestors);
    if (!arena.is_exhausted) {
        find_reach(g, &reach);
        groups = number_groups(&reach, leader, ancestors, group_of_kind);
    }
    free_arena(&arena);
    return groups;
}

void find_levels(const struct graph *g, const int32_t *group_of_kind, int32_t *level)
{
    for (int64_t call = 0; call < g->calls; call++) {
        const int32_t group = group_of_kind[g->kind[call]];
        level[call] = 0;
        for (int32_t read = g->first_read[call]; read < g->first_read[call + 1]; read++) {
            const int32_t maker = maker_of(g, g->read[read]);
            if (maker >= 0 && group_of_kind[g->kind[maker]] == group && level[maker] >= level[call])
                level[call] = level[maker] + 1;
        }
    }
}
