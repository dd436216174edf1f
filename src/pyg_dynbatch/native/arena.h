/* Memory of one call: arrays that are made one by one and freed together.

       struct arena arena = {0};
       int32_t *depth = new_array(&arena, calls, sizeof *depth);
       int32_t *sorted = new_array(&arena, calls, sizeof *sorted);
       if (!arena.is_exhausted)
           ...
       free_arena(&arena); */

#ifndef PYG_DYNBATCH_ARENA_H
#define PYG_DYNBATCH_ARENA_H

#include "arguments.h"

struct arena {
    struct block *last;
    int is_exhausted; /* whether an array could not be made */
};

/* An array of zeros; NULL if there is no memory, or if its size is no valid number. */
void *new_array(struct arena *arena, int64_t count, size_t width);

void free_arena(struct arena *arena);

#endif
