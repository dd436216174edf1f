/* Lets calls that always come together run in one step, as one *pattern* of calls.

   At first each call is an instance of the pattern of its signature, in a team with all others that
   are made at the same place of the user's code, if that is known. If one argument of all instances
   of a team is made by instances of one other pattern, at the same place of it, they become
   instances of a larger pattern. In the end instances of equal patterns run together, whatever their teams.

   What could run in few steps does not run in many, such as what a recursion reads or what reads
   its results. All that an instance reads must be shallower than all that others read from it. So
   instances never wait for each other, and what they make is ready when the shallowest of it could
   be. */

#include "recordings.h"
#include <stdlib.h>
#include <string.h>

enum { MOST_FUSED = 64, MOST_PORTS = 8, MANY_TIMES = 8 };

struct pattern {
    int32_t nodes, *signature, *refer; /* of each argument of each node: -1, or a result inside */
    int32_t num_ports, *ports;         /* the arguments that are read from elsewhere */
    int32_t kind;                      /* number of the steps that run it */
    uint64_t hash;
    uint8_t *is_output; /* of each result of each node */
};

/* Instances that are compared with each other. */
struct team {
    int32_t pattern, count, left, *members; /* calls of each instance; -1 if it joined another */
    int32_t recursion;                      /* its number, or 0 outside */
};

struct fuse {
    const struct sites *sites;
    const int32_t *code;
    int64_t calls, num_signatures;
    const uint8_t *wanted; /* of each value, whether it is read later */
    const int32_t *place;  /* of each value, where in the user's code it is made; or NULL */
    const int32_t *value, *row; /* of each value, as `merge` leaves them */
    int32_t *call;         /* also the result: of each value, the instance that makes it */
    int32_t *begin, *first_read, *read; /* of calls; result: of instances: what they read */
    int32_t *kind;         /* result: of each instance, its signature, or a fused pattern */
    int32_t *first_member, *member; /* result: where the calls of each instance begin in the code */
    int32_t *first_chain, *chain;   /* result: of each fused pattern, see `write_chains` */
    int64_t *counts; /* result: fused patterns, most outputs of one; in `first_chain`, their ends */
    /* Room. */
    struct pattern *patterns;
    struct team *teams;
    int32_t num_patterns, num_teams, *slots; /* patterns by their hash */
    int64_t mask;
    int32_t *signature, *team, *instance, *node, *depth, *stamp; /* of each call */
    int32_t *level;   /* of each call, its depth within its recursion; 0 outside */
    int32_t *seen;    /* of each level, of readers and of what they read */
    int32_t *outside; /* how often others read an instance, at its last call */
    uint8_t *is_list; /* of each signature, whether an argument is ragged, or there are many */
    int32_t *first_result, *times, *inside; /* of calls; of results: reads, and those inside */
    int32_t *expected;                      /* of the ports of a pattern */
    int32_t attempt;
};

static int32_t results_of(const struct fuse *f, int32_t call)
{
    return f->sites->results[f->code[f->begin[call]]];
}

/* The call of this flush that makes a value, or -1. */
static int32_t maker_of(const struct fuse *f, int32_t value)
{
    return f->row[value] >= 0 ? -1 : f->call[value];
}

static int32_t *members_of(const struct fuse *f, int32_t call)
{
    const struct team *team = f->teams + f->team[call];
    return team->members + (int64_t)f->instance[call] * f->patterns[team->pattern].nodes;
}

/* Patterns. */

/* The number of a pattern, which is added if it is new; -1 without memory. */
static int32_t add_pattern(struct fuse *f, int32_t nodes, const int32_t *signature,
                           const int32_t *refer)
{
    const int64_t width = f->sites->most_arguments, results = f->sites->most_results;
    uint64_t hash = 1469598103934665603u;
    for (int32_t each = 0; each < nodes; each++)
        hash = (hash ^ (uint32_t)signature[each]) * 1099511628211u;
    for (int32_t each = 0; each < nodes * width; each++)
        hash = (hash ^ (uint32_t)refer[each]) * 1099511628211u;
    int64_t at = (int64_t)((hash ^ hash >> 32) & (uint64_t)f->mask);
    for (int32_t each; (each = f->slots[at]) >= 0; at = (at + 1) & f->mask) {
        const struct pattern *p = f->patterns + each;
        if (p->hash == hash && p->nodes == nodes &&
            !memcmp(p->signature, signature, nodes * sizeof *signature) &&
            !memcmp(p->refer, refer, nodes * width * sizeof *refer))
            return each;
    }
    struct pattern *p = f->patterns + f->num_patterns;
    p->signature = malloc(nodes * (1 + 2 * width) * sizeof *p->signature);
    p->is_output = calloc(nodes * results + 1, 1);
    if (!p->signature || !p->is_output) {
        free(p->signature);
        free(p->is_output);
        return -1;
    }
    p->nodes = nodes;
    p->hash = hash;
    p->kind = nodes == 1 ? *signature : -1;
    p->refer = p->signature + nodes;
    p->ports = p->refer + nodes * width;
    p->num_ports = 0;
    memcpy(p->signature, signature, nodes * sizeof *signature);
    memcpy(p->refer, refer, nodes * width * sizeof *refer);
    for (int32_t node = 0; node < nodes; node++)
        for (int32_t each = 0; each < f->sites->arguments[signature[node]]; each++)
            if (!f->is_list[signature[node]] && refer[node * width + each] < 0)
                p->ports[p->num_ports++] = node * (int32_t)width + each;
    return f->slots[at] = f->num_patterns++;
}

static int32_t place_of(const struct fuse *f, int32_t call)
{
    return f->place ? f->place[f->begin[call]] : 0;
}

static int find_teams(struct fuse *f)
{
    int64_t entries = 64, calls = f->calls;
    const int32_t width = (int32_t)f->sites->most_arguments;
    while (entries < 2 * calls)
        entries *= 2;
    int32_t *const room = malloc((entries + calls + width + 1) * sizeof *room);
    if (!room)
        return -1;
    int32_t *const slots = room, *const first = slots + entries, *const none = first + calls;
    int failed = 0;
    memset(slots, -1, entries * sizeof *slots);
    memset(none, -1, (width + 1) * sizeof *none);
    for (int32_t call = 0; !failed && call < calls; call++) {
        const int32_t signature = f->signature[call], place = place_of(f, call);
        uint64_t hash = (uint32_t)signature * 1099511628211u + (uint32_t)place;
        hash = (hash ^ hash >> 29) * 1099511628211u;
        int64_t at = (int64_t)(hash >> 20 & (uint64_t)(entries - 1));
        while (slots[at] >= 0 && (f->signature[first[slots[at]]] != signature ||
                                  place_of(f, first[slots[at]]) != place))
            at = (at + 1) & (entries - 1);
        if (slots[at] < 0) {
            const int32_t pattern = add_pattern(f, 1, &signature, none);
            first[f->num_teams] = call;
            f->teams[f->num_teams] = (struct team){.pattern = pattern};
            slots[at] = f->num_teams++;
            failed = pattern < 0;
        }
        f->team[call] = slots[at];
        f->instance[call] = f->teams[slots[at]].count++;
        f->teams[slots[at]].left++;
    }
    for (int32_t each = 0; !failed && each < f->num_teams; each++)
        failed = !(f->teams[each].members = malloc(f->teams[each].count * sizeof(int32_t)));
    for (int32_t call = 0; !failed && call < calls; call++)
        f->teams[f->team[call]].members[f->instance[call]] = call;
    free(room);
    return failed ? -1 : 0;
}

static void count_reads(struct fuse *f)
{
    for (int32_t call = 0; call < f->calls; call++) {
        f->depth[call] = 1;
        f->first_result[call + 1] = f->first_result[call] + results_of(f, call);
        for (int32_t result = 0; result < results_of(f, call); result++)
            f->outside[call] += f->wanted[f->begin[call] + result];
        for (int32_t each = f->first_read[call]; each < f->first_read[call + 1]; each++) {
            const int32_t maker = maker_of(f, f->read[each]);
            if (maker < 0)
                continue;
            f->outside[maker]++;
            f->times[f->first_result[maker] + f->read[each] - f->begin[maker]]++;
            if (f->depth[maker] >= f->depth[call])
                f->depth[call] = f->depth[maker] + 1;
            const int32_t recursion = f->teams[f->team[call]].recursion;
            if (recursion && f->teams[f->team[maker]].recursion == recursion &&
                f->level[maker] >= f->level[call])
                f->level[call] = f->level[maker] + 1;
        }
    }
}

struct visit {
    int32_t number, lowest, instance, read, reads_itself;
};

/* The next team whose results a team reads, or -1. */
static int32_t next_read_team(const struct fuse *f, int32_t team, struct visit *v)
{
    for (; v->instance < f->teams[team].count; v->instance++, v->read = 0) {
        const int32_t call = f->teams[team].members[v->instance];
        while (f->first_read[call] + v->read < f->first_read[call + 1]) {
            const int32_t maker = maker_of(f, f->read[f->first_read[call] + v->read++]);
            if (maker >= 0)
                return f->team[maker];
        }
    }
    return -1;
}

/* Numbers the recursions: teams that read each other, by Tarjan's algorithm. */
static int find_recursions(struct fuse *f)
{
    struct visit *const visits = calloc(f->num_teams + 1, sizeof *visits);
    int32_t *const path = malloc((2 * f->num_teams + 1) * sizeof *path);
    int32_t *const open = path + f->num_teams, numbers = 0, recursions = 0, length, opened = 0;
    for (int32_t root = 0; visits && path && root < f->num_teams; root++) {
        for (path[0] = root, length = !visits[root].number; length;) {
            const int32_t team = path[length - 1];
            struct visit *const own = visits + team;
            if (!own->number) {
                own->number = own->lowest = ++numbers;
                f->teams[team].recursion = -1;
                open[opened++] = team;
            }
            const int32_t read = next_read_team(f, team, own);
            if (read >= 0 && !visits[read].number)
                path[length++] = read;
            else if (read >= 0) {
                own->reads_itself |= read == team;
                if (f->teams[read].recursion < 0 && visits[read].number < own->lowest)
                    own->lowest = visits[read].number;
            } else {
                if (--length && own->lowest < visits[path[length - 1]].lowest)
                    visits[path[length - 1]].lowest = own->lowest;
                if (own->lowest < own->number)
                    continue;
                const int32_t found = open[opened - 1] != team || own->reads_itself;
                recursions += found;
                do
                    f->teams[open[--opened]].recursion = found ? recursions : 0;
                while (open[opened] != team);
            }
        }
    }
    const int failed = !visits || !path;
    free(visits);
    free(path);
    return failed ? -1 : 0;
}

/* Looks at an instance that is made of `count` calls: the depth of the deepest value that it reads,
   and of the shallowest that others read. Marks these in `is_output` if there is one. */
static void find_limits(struct fuse *f, const int32_t *calls, int32_t count, int32_t *deepest,
                        int32_t *shallowest, uint8_t *is_output)
{
    const int32_t attempt = ++f->attempt;
    *deepest = 0;
    *shallowest = INT32_MAX;
    for (int32_t each = 0; each < count; each++)
        f->stamp[calls[each]] = attempt;
    for (int32_t each = 0; each < count; each++)
        for (int32_t at = f->first_read[calls[each]]; at < f->first_read[calls[each] + 1]; at++) {
            const int32_t maker = maker_of(f, f->read[at]);
            if (maker < 0)
                continue;
            if (f->stamp[maker] == attempt)
                f->inside[f->first_result[maker] + f->read[at] - f->begin[maker]]++;
            else if (f->depth[maker] > *deepest)
                *deepest = f->depth[maker];
        }
    for (int32_t each = 0; each < count; each++)
        for (int32_t result = 0; result < results_of(f, calls[each]); result++) {
            const int32_t at = f->first_result[calls[each]] + result;
            const int is_read = f->times[at] > f->inside[at] ||
                                f->wanted[f->begin[calls[each]] + result];
            f->inside[at] = 0;
            if (is_read && f->depth[calls[each]] < *shallowest)
                *shallowest = f->depth[calls[each]];
            if (is_read && is_output)
                is_output[each * f->sites->most_results + result] = 1;
        }
}

/* The results of one instance that another reads: -1 for none, or their numbers in its pattern, for
   each port of the reader. Returns how many there are, or -1 if some cannot be read inside. */
static int32_t find_ports(const struct fuse *f, const struct pattern *reader, const int32_t *calls,
                          int32_t team, int32_t instance, int32_t *ports)
{
    const int32_t width = (int32_t)f->sites->most_arguments;
    int32_t found = 0;
    for (int32_t each = 0; each < reader->num_ports; each++) {
        const int32_t port = reader->ports[each];
        const int32_t value = f->read[f->first_read[calls[port / width]] + port % width];
        const int32_t maker = maker_of(f, value);
        ports[each] = -1;
        if (maker < 0 || f->team[maker] != team || f->instance[maker] != instance)
            continue;
        ports[each] = f->node[maker] * (int32_t)f->sites->most_results + value - f->begin[maker];
        found++;
    }
    for (int32_t node = 0; node < reader->nodes; node++) {
        const int32_t call = calls[node];
        if (!f->is_list[reader->signature[node]])
            continue;
        for (int32_t at = f->first_read[call]; at < f->first_read[call + 1]; at++) {
            const int32_t maker = maker_of(f, f->read[at]);
            if (maker >= 0 && f->team[maker] == team && f->instance[maker] == instance)
                return -1;
        }
    }
    return found;
}

/* Whether an instance of a team can be joined by the one that makes an argument; `first` says how
   that is for the first instance, which is noted there. */
struct first {
    int32_t pattern, has_ports, reads;
};

static int can_join(struct fuse *f, int32_t team, const int32_t *calls, int32_t node, int32_t each,
                    struct first *first)
{
    const struct pattern *const reader = f->patterns + f->teams[team].pattern;
    const int64_t ports = reader->num_ports;
    const int32_t call = calls[node], maker = maker_of(f, f->read[f->first_read[call] + each]);
    if (maker < 0 || f->team[maker] == team || !f->sites->arguments[f->signature[maker]])
        return 0;
    const int32_t pattern = f->teams[f->team[maker]].pattern, count = f->patterns[pattern].nodes;
    int32_t deepest, shallowest, joined[MOST_FUSED], *const found = f->expected + ports;
    if (!first->has_ports)
        *first = (struct first){pattern, 0, 0};
    if (pattern != first->pattern || count + reader->nodes > MOST_FUSED)
        return 0;
    const int32_t reads =
        find_ports(f, reader, calls, f->team[maker], f->instance[maker], found);
    if (reads < 0)
        return 0;
    if (!first->has_ports)
        memcpy(f->expected, found, ports * sizeof *found);
    else if (memcmp(f->expected, found, ports * sizeof *found))
        return 0;
    first->has_ports = 1;
    first->reads = reads;
    const int32_t *const makers = members_of(f, maker);
    if (f->outside[makers[count - 1]] == reads)
        return 1; /* nobody else reads it */
    memcpy(joined, makers, count * sizeof *joined);
    memcpy(joined + count, calls, reader->nodes * sizeof *joined);
    find_limits(f, joined, count + reader->nodes, &deepest, &shallowest, NULL);
    return deepest < shallowest;
}

/* Adds the pattern of instances of `before` that are joined with instances of `reader`. */
static int32_t join_patterns(struct fuse *f, int32_t before, int32_t reader)
{
    const int32_t width = (int32_t)f->sites->most_arguments;
    const int32_t results = (int32_t)f->sites->most_results;
    const struct pattern p = f->patterns[before], q = f->patterns[reader];
    const int32_t nodes = p.nodes + q.nodes, first = p.nodes * width;
    int32_t *const signature = malloc(nodes * (1 + width) * sizeof *signature);
    if (!signature)
        return -1;
    int32_t *const refer = signature + nodes;
    memcpy(signature, p.signature, p.nodes * sizeof *signature);
    memcpy(signature + p.nodes, q.signature, q.nodes * sizeof *signature);
    memcpy(refer, p.refer, first * sizeof *refer);
    for (int32_t at = 0; at < q.nodes * width; at++)
        refer[first + at] = q.refer[at] < 0 ? -1 : q.refer[at] + p.nodes * results;
    for (int32_t each = 0; each < q.num_ports; each++)
        refer[first + q.ports[each]] = f->expected[each];
    const int32_t found = add_pattern(f, nodes, signature, refer);
    free(signature);
    return found;
}

/* Joins all instances of a team with those that make an argument of a node, if all can be; returns
   whether they were, or -1 without memory. */
static int join(struct fuse *f, int32_t number, int32_t node, int32_t each)
{
    struct team *const team = f->teams + number;
    const int32_t nodes = f->patterns[team->pattern].nodes;
    struct first first = {0};
    for (int32_t instance = 0; instance < team->count; instance++) {
        const int32_t *const calls = team->members + (int64_t)instance * nodes;
        if (*calls >= 0 && !can_join(f, number, calls, node, each, &first))
            return 0;
    }
    if (!first.has_ports)
        return 0;
    /* Each joins one other at most, and what could run at few levels does not run at many. */
    const int32_t before = f->patterns[first.pattern].nodes, attempt = ++f->attempt;
    int32_t levels = 0, levels_before = 0;
    for (int32_t instance = 0; instance < team->count; instance++) {
        const int32_t *const calls = team->members + (int64_t)instance * nodes;
        if (*calls < 0)
            continue;
        const int32_t maker = maker_of(f, f->read[f->first_read[calls[node]] + each]);
        int32_t *const stamp = f->stamp + *members_of(f, maker);
        if (*stamp == attempt)
            return 0;
        *stamp = attempt;
        levels += f->seen[2 * f->level[calls[node]]] != attempt;
        levels_before += f->seen[2 * f->level[maker] + 1] != attempt;
        f->seen[2 * f->level[calls[node]]] = f->seen[2 * f->level[maker] + 1] = attempt;
    }
    if (levels > 2 * levels_before || levels_before > 2 * levels)
        return 0;
    const int32_t pattern = join_patterns(f, first.pattern, team->pattern);
    int32_t *const members = malloc((int64_t)team->count * (before + nodes) * sizeof *members);
    if (pattern < 0 || !members) {
        free(members);
        return -1;
    }
    int32_t *next = members, count = 0;
    for (int32_t instance = 0; instance < team->count; instance++) {
        const int32_t *const calls = team->members + (int64_t)instance * nodes;
        if (*calls < 0)
            continue;
        const int32_t maker = maker_of(f, f->read[f->first_read[calls[node]] + each]);
        int32_t *const others = members_of(f, maker);
        f->outside[calls[nodes - 1]] += f->outside[others[before - 1]] - first.reads;
        memcpy(next, others, before * sizeof *next);
        memcpy(next + before, calls, nodes * sizeof *next);
        *others = -1;
        f->teams[f->team[maker]].left--;
        for (int32_t at = 0; at < before + nodes; at++) {
            f->team[next[at]] = number;
            f->instance[next[at]] = count;
            f->node[next[at]] = at;
        }
        next += before + nodes;
        count++;
    }
    free(team->members);
    *team = (struct team){pattern, count, count, members, team->recursion};
    return 1;
}

/* Joins a team with others until no more can be; returns whether one could, or -1. */
static int join_all(struct fuse *f, int32_t number)
{
    const int32_t width = (int32_t)f->sites->most_arguments;
    int any = 0;
    for (int found = 1; found;) {
        const struct pattern *const p = f->patterns + f->teams[number].pattern;
        found = 0;
        for (int32_t each = p->num_ports - 1; !found && each >= 0; each--)
            found = join(f, number, p->ports[each] / width, p->ports[each] % width);
        if (found < 0)
            return -1;
        any |= found;
    }
    return any;
}

/* The results. */

/* The instances in an order in which each comes after those that it reads; -1 in `order` begins
   those that there are not. Notes the outputs of patterns. */
static int32_t sort_instances(struct fuse *f, int32_t *order, int32_t *key, int32_t *first)
{
    int32_t count = 0, deepest, most = 0;
    for (int32_t call = 0; call < f->calls; call++) {
        const int32_t *const calls = members_of(f, call);
        struct pattern *const p = f->patterns + f->teams[f->team[call]].pattern;
        if (f->node[call])
            continue;
        find_limits(f, calls, p->nodes, &deepest, key + call, p->is_output);
        if (key[call] == INT32_MAX)
            key[call] = f->depth[calls[p->nodes - 1]];
        most = key[call] > most ? key[call] : most;
    }
    memset(first, 0, (most + 2) * sizeof *first);
    for (int32_t call = 0; call < f->calls; call++)
        first[f->node[call] ? 0 : key[call] + 1]++;
    first[0] = 0;
    for (int32_t each = 0; each < most; each++)
        first[each + 1] += first[each];
    for (int32_t call = 0; call < f->calls; call++)
        if (!f->node[call]) {
            order[first[key[call]]++] = call;
            count++;
        }
    return count;
}

/* A chain is its number of nodes, its number of outputs, for each node its signature and what its
   arguments refer to, and for each output its node and which of the results it is. */
static void write_chains(struct fuse *f)
{
    const struct sites *s = f->sites;
    int32_t *next = f->chain;
    f->counts[0] = 0;
    f->counts[1] = s->most_results;
    for (int32_t each = 0; each < f->num_patterns; each++) {
        struct pattern *const p = f->patterns + each;
        if (p->kind != -2)
            continue;
        p->kind = (int32_t)(f->num_signatures + f->counts[0]);
        f->first_chain[f->counts[0]++] = (int32_t)(next - f->chain);
        int32_t *const begin = next;
        *next++ = p->nodes;
        *next++ = 0;
        for (int32_t node = 0; node < p->nodes; node++) {
            *next++ = p->signature[node];
            for (int32_t argument = 0; argument < s->arguments[p->signature[node]]; argument++)
                *next++ = p->refer[node * s->most_arguments + argument];
        }
        for (int32_t at = 0; at < p->nodes * s->most_results; at++)
            if (p->is_output[at]) {
                *next++ = at / (int32_t)s->most_results;
                *next++ = at % (int32_t)s->most_results;
                begin[1]++;
            }
        if (begin[1] > f->counts[1])
            f->counts[1] = begin[1];
        f->first_chain[f->counts[0]] = (int32_t)(next - f->chain);
    }
}

/* Writes what instances consist of and read; returns how many there are, or -1 without memory. */
static int64_t write_instances(struct fuse *f)
{
    const int64_t calls = f->calls, reads = f->first_read[calls];
    int32_t *const room = malloc((4 * calls + 2 + reads + calls + 1) * sizeof *room);
    if (!room)
        return -1;
    int32_t *const order = room, *const key = order + calls, *const first = key + calls;
    int32_t *const begins = first + calls + 2, *read = begins + calls, *next = read;
    const int32_t count = sort_instances(f, order, key, first);
    for (int32_t each = 0; each < f->num_teams; each++)
        for (int32_t at = 0; at < f->teams[each].count; at++) {
            struct pattern *const p = f->patterns + f->teams[each].pattern;
            if (f->teams[each].members[(int64_t)at * p->nodes] >= 0 && p->nodes > 1)
                p->kind = -2; /* it is used */
        }
    write_chains(f);
    int32_t member = 0;
    for (int32_t each = 0; each < count; each++) {
        const struct pattern *const p = f->patterns + f->teams[f->team[order[each]]].pattern;
        const int32_t *const mine = members_of(f, order[each]);
        f->kind[each] = p->kind;
        f->first_member[each] = member;
        key[each] = (int32_t)(next - read);
        for (int32_t node = 0; node < p->nodes; node++) {
            const int32_t call = mine[node];
            const int is_list = f->is_list[p->signature[node]];
            f->member[member] = f->begin[call];
            begins[member++] = call;
            for (int32_t at = f->first_read[call]; at < f->first_read[call + 1]; at++)
                if (is_list || p->refer[node * f->sites->most_arguments + at - f->first_read[call]] < 0)
                    *next++ = f->read[at];
        }
    }
    f->first_member[count] = member;
    for (int32_t each = 0; each < count; each++)
        for (int32_t at = f->first_member[each]; at < f->first_member[each + 1]; at++)
            for (int32_t result = 0; result < results_of(f, begins[at]); result++)
                f->call[f->member[at] + result] = each;
    for (int32_t each = 0; each < count; each++) {
        f->begin[each] = f->member[f->first_member[each]];
        f->first_read[each] = key[each];
    }
    f->first_read[count] = (int32_t)(next - read);
    memcpy(f->read, read, (next - read) * sizeof *read);
    free(room);
    return count;
}

static int64_t fuse(struct fuse *f)
{
    const struct sites *s = f->sites;
    const int64_t calls = f->calls;
    int64_t results = 0, instances = -1;
    for (int64_t call = 0; call < calls; call++)
        results += s->results[f->code[f->begin[call]]];
    int32_t *const room = calloc(12 * calls + 5 + 2 * results +
                                 2 * MOST_FUSED * s->most_arguments, sizeof *room);
    const int64_t most = 3 * calls + 2 * MOST_FUSED; /* of patterns */
    f->patterns = malloc(most * sizeof *f->patterns);
    f->teams = malloc((calls + 1) * sizeof *f->teams);
    f->num_patterns = f->num_teams = f->attempt = 0;
    f->is_list = calloc(f->num_signatures + 1, 1);
    for (f->mask = 63; f->mask < 2 * most;)
        f->mask = 2 * f->mask + 1;
    f->slots = malloc((f->mask + 1) * sizeof *f->slots);
    if (room && f->patterns && f->teams && f->is_list && f->slots) {
        memset(f->slots, -1, (f->mask + 1) * sizeof *f->slots);
        int32_t *next = room;
        int32_t **of_call[] = {&f->signature, &f->team,  &f->instance, &f->node,
                               &f->depth,     &f->stamp, &f->outside,  &f->level};
        for (int each = 0; each < COUNT(of_call); each++, next += calls)
            *of_call[each] = next;
        f->first_result = next;
        f->seen = next + calls + 1;
        f->times = f->seen + 2 * (calls + 1);
        f->inside = f->times + results;
        f->expected = f->inside + results;
        for (int32_t each = 0; each < f->num_signatures; each++) {
            f->is_list[each] = s->arguments[each] > MOST_PORTS;
            for (int32_t argument = 0; argument < s->arguments[each]; argument++)
                f->is_list[each] |= is_ragged(s, each, argument);
        }
        for (int64_t call = 0; call < calls; call++)
            f->signature[call] = s->signature[f->code[f->begin[call]]];
        int found = find_teams(f) || find_recursions(f) ? -1 : 1;
        if (found == 1)
            count_reads(f);
        for (int time = 0; found == 1 && time < MANY_TIMES; time++) {
            found = 0;
            for (int32_t each = f->num_teams - 1; found >= 0 && each >= 0; each--) {
                const int is_room = f->num_patterns + MOST_FUSED < most;
                const int any = is_room && f->teams[each].left ? join_all(f, each) : 0;
                found = any < 0 ? -1 : found | any;
            }
        }
        if (found >= 0)
            instances = write_instances(f);
    }
    for (int32_t each = 0; f->patterns && each < f->num_patterns; each++) {
        free(f->patterns[each].signature);
        free(f->patterns[each].is_output);
    }
    for (int32_t each = 0; f->teams && each < f->num_teams; each++)
        free(f->teams[each].members);
    free(f->patterns);
    free(f->teams);
    free(f->is_list);
    free(f->slots);
    free(room);
    return instances;
}

static const struct field fields_of_fuse[] = {
    FIELD(fuse, sites), FIELD(fuse, code), FIELD(fuse, calls), FIELD(fuse, num_signatures),
    FIELD(fuse, wanted), FIELD(fuse, place), FIELD(fuse, value), FIELD(fuse, row), FIELD(fuse, call),
    FIELD(fuse, begin), FIELD(fuse, first_read), FIELD(fuse, read), FIELD(fuse, kind),
    FIELD(fuse, first_member), FIELD(fuse, member), FIELD(fuse, first_chain), FIELD(fuse, chain),
    FIELD(fuse, counts),
};

FUNCTION(fuse)

PyMethodDef fuse_functions[] = {
    METHOD(fuse, "Let calls that come together run in one step; return the number of instances."),
    {NULL, NULL, 0, NULL},
};
