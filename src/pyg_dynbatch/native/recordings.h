/* Recordings as C reads them; core/recording.py tells what their integers mean. */

#ifndef PYG_DYNBATCH_RECORDINGS_H
#define PYG_DYNBATCH_RECORDINGS_H

#include "arguments.h"

enum { CONSTANT, INPUT, CALL };

/* What records name by number; there are at most `most_results` results of a site and
   `most_arguments` of a signature. */
struct sites {
    const int32_t *kind, *signature, *results, *type; /* of each site, and type of each result */
    const int32_t *arguments, *is_ragged, *mergeable; /* of each signature, and each argument */
    const int32_t *argument_type;
    int64_t most_results, most_arguments;
};

static inline int is_ragged(const struct sites *s, int32_t signature, int32_t argument)
{
    return s->is_ragged[signature * s->most_arguments + argument];
}

/* How many values the next argument of a call has, after their number if it is ragged. */
static inline int32_t values_of(const struct sites *s, int32_t signature, int32_t argument,
                                const int32_t **next)
{
    return is_ragged(s, signature, argument) ? *(*next)++ : 1;
}

/* Where the record ends that begins at `code`. */
static inline const int32_t *end_of(const struct sites *s, const int32_t *code)
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
static inline int32_t type_of(const struct sites *s, int32_t site)
{
    return s->type[site * s->most_results];
}

/* Numbers the different ones of rows of `width` bytes in the order in which they appear. */
struct distinct {
    const char *rows;
    int64_t count, width;
    int32_t *number; /* result: of each row */
    int32_t *first;  /* result: the first row of each number */
};

/* Returns how many numbers there are, or -1 without memory. */
int64_t distinct(struct distinct *d);

#endif
