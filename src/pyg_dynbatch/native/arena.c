/* Memory of one call: see arena.h. */

#include "arena.h"
#include <stdlib.h>

/* What precedes each array; its size keeps arrays aligned. */
struct block {
    struct block *before;
    int64_t unused;
};

void *new_array(struct arena *arena, int64_t count, size_t width)
{
    struct block *block = NULL;
    if (count >= 0 && (uint64_t)count <= (PTRDIFF_MAX - sizeof *block) / width)
        block = calloc(1, sizeof *block + (size_t)count * width);
    if (!block) {
        arena->is_exhausted = 1;
        return NULL;
    }
    block->before = arena->last;
    arena->last = block;
    return block + 1;
}

void free_arena(struct arena *arena)
{
    while (arena->last) {
        struct block *const block = arena->last;
        arena->last = block->before;
        free(block);
    }
}
