/* What recorder.c, values.c, lookup.c and snapshot.c share: see recorder.c. */

#ifndef PYG_DYNBATCH_RECORDER_H
#define PYG_DYNBATCH_RECORDER_H

#include "arguments.h"
#include <structmember.h>

enum { OPEN = -1, FAILED_SITE = -2 }; /* in place of the number of a site */

/* What Python has given by `setup`. */
struct known {
    PyObject *lazy, *tensor, *parameter, *size, *constants, *module, *like, *metadata;
    PyObject *grad_enabled, *autocast_enabled, *call_module, *no_session, *answer, *operators;
    PyObject *zero, *is_wrapped;
};
extern struct known known;

extern PyObject *recorder_type, *function_type;
extern _Thread_local PyObject *active; /* the recorder of this thread, or NULL */

struct site {
    PyObject *object, *build, *parts; /* what makes the result of its rows; snapshots of modules */
    int32_t number, reads, results, *kinds;
    int gradient; /* 0, 1, or -1: as the arguments */
};

struct entry {
    int64_t words, first; /* how many, and where */
    int64_t site;         /* or OPEN */
    uint64_t hash;
};

struct lookup {
    PyObject_HEAD
    struct site *sites;
    int64_t num_sites, *of_number, num_numbers;
    struct entry *entries; /* by hash; those without words are free */
    int64_t used, mask;
    uint64_t *words;
    int64_t num_words, room;
    PyObject *kept; /* objects whose addresses are words */
};

/* One value of one example: `Lazy` of Python is derived from it. */
struct value {
    PyObject_HEAD
    PyObject *session;
    int32_t number, kind;
};

struct recorder {
    PyObject_HEAD
    struct lookup *lookup;
    PyObject *root, *refused; /* the argument that could not be recorded last */
    PyObject *numbers, *belonging; /* values by dtype and number; names of parameters by address */
    /* Rows from outside, as Session has them; NULL if this records none. */
    PyObject *known, *like, *outside, *next_row, *unread, *device;
    PyObject *met; /* by address: the number of a parameter, and if it needs gradients */
    int32_t *code, *place;    /* since the last flush; where records begin: the line of the user */
    int64_t size, room, base; /* of `code`, and how many integers were before */
    uint8_t *flags, *alive;   /* of each value: NEEDS_GRAD, and how many objects stand for it */
    int64_t flags_room;
    char grad, autocast, can_run;
};

/* Returns an array with room for `wanted` items, or NULL with an exception set. */
void *grown(void *array, int64_t wanted, int64_t *room, size_t width);

/* The place of a site of Python, which is added if it is new; OPEN, or FAILED_SITE with an exception
   set. */
int64_t add_site(struct lookup *l, PyObject *object);

/* The entry of these words, or the free one where they belong; NULL without memory. */
struct entry *find_entry(const struct lookup *l, const uint64_t *words, int64_t count);

/* Notes the site of some words; the addresses of objects among these stay valid. */
int add_entry(struct lookup *l, const uint64_t *words, int64_t count, int64_t site,
              PyObject *const *objects, int num_objects);

/* Whether no module of a site has changed since the last call; -1 with an exception set. */
int is_unchanged(const struct site *site);

/* Records a call of a target with a tuple and a dictionary or NULL, or of up to two arguments. */
PyObject *record_tuple(PyObject *recorder, PyObject *target, PyObject *args, PyObject *kwargs);
PyObject *record_operator(PyObject *target, PyObject *left, PyObject *right);
PyObject *not_recorded(void);

void free_object(PyObject *self);

#endif
