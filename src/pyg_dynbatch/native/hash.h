/* Hashes of integers, one after another, and the sizes of tables that are indexed by them. */

#ifndef PYG_DYNBATCH_HASH_H
#define PYG_DYNBATCH_HASH_H

#include "arguments.h"

#define FIRST_HASH UINT64_C(1469598103934665603)

static inline uint64_t next_hash(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(1099511628211);
    return hash ^ hash >> 29;
}

/* A power of two, with free entries beside `count` others. */
static inline int64_t table_size(int64_t count)
{
    int64_t entries = 16;
    while (entries < 2 * count)
        entries *= 2;
    return entries;
}

#endif
