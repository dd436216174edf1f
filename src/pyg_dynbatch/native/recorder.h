/* What the recorder of autobatch consists of; autobatch/recorder.py says what it computes.

   recorder.c appends records, calls.c looks up the calls that are recorded, outside.c their tensors
   from outside, lookup.c holds the sites, snapshot.c notices changes of modules, values.c has the
   values that models compute with, and intercept.c lets modules be recorded. */

#ifndef PYG_DYNBATCH_RECORDER_H
#define PYG_DYNBATCH_RECORDER_H

#include "arguments.h"
#include <structmember.h>

/* In place of the number of a site: VARIES for calls whose numbers are data. */
enum { OPEN = -1, FAILED_SITE = -2, VARIES = -3 };

/* What Python has given by `setup`. */
struct known {
    PyObject *lazy, *tensor, *parameter, *size, *constants, *module, *like, *metadata;
    PyObject *grad_enabled, *autocast_enabled, *call_module, *no_session, *answer, *operators;
    PyObject *zero, *is_wrapped;
};
extern struct known known;

extern PyObject *recorder_type, *lookup_type, *snapshot_type, *function_type;
extern _Thread_local PyObject *active; /* the recorder of this thread, or NULL */

struct site {
    PyObject *object, *build, *parts; /* what makes the result of its rows; snapshots of modules */
    int32_t *kinds;                   /* of its results */
    int32_t number, reads, results;
    int gradient; /* 0, 1, or -1: as the arguments */
    int is_view;  /* whether its results may share memory with its arguments */
};

struct entry {
    int64_t words, first; /* how many, and where */
    int64_t site;         /* its number, or OPEN */
    uint64_t hash;
};

/* The sites of a model by their numbers, and calls by their words. */
struct lookup {
    PyObject_HEAD
    struct site *sites; /* those that are not known have no object */
    int64_t num_sites;
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

/* HAS_VIEWS: others may share its memory; IS_VIEW: it may share that of what it was made of;
   IS_FIRST: its record begins at its number. */
enum { NEEDS_GRAD = 1, IS_VIEW = 2, HAS_VIEWS = 4, IS_FIRST = 8 };

struct recorder {
    PyObject_HEAD
    PyObject *lookup;              /* a struct lookup */
    PyObject *root, *refused;      /* the argument that could not be recorded last */
    PyObject *numbers, *belonging; /* values by dtype and number; names of parameters by address */
    /* Rows from outside, as Session has them; NULL if this records none. */
    PyObject *known, *like, *outside, *next_row, *unread, *device;
    PyObject *watcher;        /* code of the mode that watches an example, or None */
    PyObject *met;            /* by address: the number of a parameter, and if it needs gradients */
    int32_t *code, *place;    /* since the last flush; where records begin: the line of the user */
    int64_t size, room, base; /* of `code`, and how many integers were before */
    uint8_t *flags, *alive;   /* of each value: see above, and how many objects stand for it */
    int64_t flags_room;
    char grad, autocast;
};

/* Returns an array with room for `count` items, or NULL with an exception set. */
void *grown(void *array, int64_t count, int64_t *room, size_t width);

/* Returns -1 with an exception set for a recorder without sites. */
int check_lookup(const struct recorder *r);

/* Copies a sequence of integers; NULL with an exception set if there is none. */
int32_t *integers_of(PyObject *sequence, Py_ssize_t *count);

/* The number of a site of Python, which is added if it is new; OPEN, VARIES, or FAILED_SITE with an
   exception set. */
int64_t add_site(struct lookup *l, PyObject *object);

/* The entry of these words, or the free one where they belong. */
struct entry *find_entry(const struct lookup *l, const uint64_t *words, int64_t count);

/* Notes the site of some words; the addresses of objects among these stay valid. */
int add_entry(struct lookup *l, const uint64_t *words, int64_t count, int64_t site,
              PyObject *const *objects, int num_objects);

/* Whether no module of a site has changed since the last call; -1 with an exception set. */
int is_unchanged(const struct site *site);

/* Appends a record and returns its results; `integers` is what follows the number of the site. */
PyObject *append_record(struct recorder *r, int64_t site, const int32_t *reads, int64_t num_reads,
                        const int32_t *integers, int64_t num_integers);

/* Finds the value of a tensor from outside, or NULL if only Python can tell; -1 with an exception
   set. */
int find_row(struct recorder *r, PyObject *tensor, PyObject **row);

/* Records a call of a target with a tuple and a dictionary or NULL, of up to two arguments, or of a
   module. */
PyObject *record_tuple(PyObject *recorder, PyObject *target, PyObject *args, PyObject *kwargs);
PyObject *record_operator(PyObject *target, PyObject *left, PyObject *right);
PyObject *record_module(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *not_recorded(void);

/* Whether a mode watches the tensors of an example, each of which is then a row of its own. */
int is_watched(const struct recorder *r);

/* Whether a function without arguments returns True; -1 with an exception set. */
int is_true(PyObject *function);

/* Replaces what a place refers to by a new reference. */
void set_reference(PyObject **place, PyObject *reference);

/* Whether all numbers are those of values that were recorded; 0 with an exception set. */
int are_values(const struct recorder *r, const int32_t *numbers, int64_t count);

/* Notes that one more object stands for a value, or one fewer. */
void count_alive(const struct recorder *r, int64_t number, int more);

/* Frees an object after what it refers to. */
void free_object(PyObject *self);

#endif
