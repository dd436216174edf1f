/* The sites of a model, and which of them calls have, by their words.

   Words are kept one call after another. After two calls, of site 3 with four words and of site 5
   with six, `words` has ten of them, and there are the entries {4, 0, 3} and {6, 4, 5} at the
   places that the hashes of the words tell. */

#include "hash.h"
#include "recorder.h"
#include <stdlib.h>

enum { MOST_ENTRIES = 1 << 16 };

void *grown(void *array, int64_t count, int64_t *room, size_t width)
{
    if (array && count <= *room)
        return array;
    int64_t more = *room < 64 ? 64 : *room;
    while (more < count && more <= PTRDIFF_MAX / 2)
        more *= 2;
    void *larger = NULL;
    if (count <= more && (uint64_t)more <= PTRDIFF_MAX / width)
        larger = realloc(array, (size_t)more * width);
    if (larger)
        *room = more;
    else
        PyErr_NoMemory();
    return larger;
}

/* Sites. */

static void clear_site(struct site *site)
{
    Py_CLEAR(site->object);
    Py_CLEAR(site->build);
    Py_CLEAR(site->parts);
}

/* Reads an attribute that is an integer of 32 bits; returns -1 with an exception set. */
static int read_integer(PyObject *owner, const char *name, int32_t *integer)
{
    PyObject *attribute = PyObject_GetAttrString(owner, name);
    const int64_t number = attribute ? PyLong_AsLongLong(attribute) : -1;
    Py_XDECREF(attribute);
    if (number == -1 && PyErr_Occurred())
        return -1;
    if (number < INT32_MIN || number > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%s has more than 32 bits", name);
        return -1;
    }
    *integer = (int32_t)number;
    return 0;
}

/* Reads the attributes of a site of Python; returns -1 with an exception set. */
static int read_site(struct site *site, PyObject *object)
{
    PyObject *gradient = PyObject_GetAttrString(object, "gradient");
    if (!gradient)
        return -1;
    site->gradient = gradient == Py_None ? -1 : gradient == Py_True;
    Py_DECREF(gradient);
    PyObject *is_view = PyObject_GetAttrString(object, "is_view");
    if (!is_view)
        return -1;
    site->is_view = is_view == Py_True;
    Py_DECREF(is_view);
    if (read_integer(object, "num_reads", &site->reads))
        return -1;
    site->build = PyObject_GetAttrString(object, "build");
    if (!site->build)
        return -1;
    site->parts = PyObject_GetAttrString(object, "parts");
    if (!site->parts)
        return -1;
    for (Py_ssize_t each = 0; each < PyTuple_Size(site->parts); each++)
        if (!PyObject_TypeCheck(PyTuple_GetItem(site->parts, each),
                                (PyTypeObject *)snapshot_type)) {
            PyErr_SetString(PyExc_TypeError, "parts are not snapshots");
            return -1;
        }
    PyObject *kinds = PyErr_Occurred() ? NULL : PyObject_GetAttrString(object, "kinds");
    if (!kinds)
        return -1;
    Py_ssize_t results = 0;
    site->kinds = integers_of(kinds, &results);
    site->results = (int32_t)results;
    site->object = Py_NewRef(object);
    Py_DECREF(kinds);
    return site->kinds ? 0 : -1;
}

/* Makes room for sites up to a number; those that are not known have no object. */
static int make_room(struct lookup *l, int64_t number)
{
    const int64_t before = l->num_sites;
    struct site *const sites = grown(l->sites, number + 1, &l->num_sites, sizeof *sites);
    if (!sites)
        return -1;
    l->sites = sites;
    memset(sites + before, 0, (l->num_sites - before) * sizeof *sites);
    return 0;
}

int64_t add_site(struct lookup *l, PyObject *object)
{
    struct site site = {0};
    if (read_integer(object, "number", &site.number))
        return FAILED_SITE;
    if (site.number < 0)
        return site.number == VARIES ? VARIES : OPEN;
    if (site.number < l->num_sites && l->sites[site.number].object)
        return site.number;
    if (read_site(&site, object) || make_room(l, site.number)) {
        clear_site(&site);
        free(site.kinds);
        return FAILED_SITE;
    }
    l->sites[site.number] = site;
    return site.number;
}

/* Entries. */

static uint64_t hash_of(const uint64_t *words, int64_t count)
{
    uint64_t hash = FIRST_HASH;
    for (int64_t each = 0; each < count; each++)
        hash = next_hash(hash, words[each]);
    return hash ^ hash >> 32;
}

struct entry *find_entry(const struct lookup *l, const uint64_t *words, int64_t count)
{
    const uint64_t hash = hash_of(words, count);
    int64_t at = (int64_t)hash & l->mask;
    for (; l->entries[at].words; at = (at + 1) & l->mask) {
        const struct entry *const entry = l->entries + at;
        if (entry->hash == hash && entry->words == count &&
            !memcmp(l->words + entry->first, words, count * sizeof *words))
            break;
    }
    l->entries[at].hash = hash;
    return l->entries + at;
}

static int grow_entries(struct lookup *l)
{
    const int64_t before = l->entries ? l->mask + 1 : 0;
    if (l->used >= MOST_ENTRIES) { /* texts and objects that are new at each call */
        memset(l->entries, 0, before * sizeof *l->entries);
        l->used = 0;
        l->num_words = 0;
        return PyList_SetSlice(l->kept, 0, PyList_Size(l->kept), NULL);
    }
    if (2 * l->used < before)
        return 0;
    const int64_t size = before ? 2 * before : 64;
    struct entry *const old = l->entries, *const entries = calloc(size, sizeof *entries);
    if (!entries) {
        PyErr_NoMemory();
        return -1;
    }
    l->mask = size - 1;
    for (int64_t each = 0; each < before; each++)
        if (old[each].words) {
            int64_t at = (int64_t)old[each].hash & l->mask;
            while (entries[at].words)
                at = (at + 1) & l->mask;
            entries[at] = old[each];
        }
    l->entries = entries;
    free(old);
    return 0;
}

int add_entry(struct lookup *l, const uint64_t *words, int64_t count, int64_t site,
              PyObject *const *objects, int num_objects)
{
    if (grow_entries(l))
        return -1;
    uint64_t *const room = grown(l->words, l->num_words + count, &l->room, sizeof *room);
    if (!room)
        return -1;
    l->words = room;
    for (int each = 0; each < num_objects; each++)
        if (PyList_Append(l->kept, objects[each]))
            return -1;
    struct entry *const entry = find_entry(l, words, count);
    memcpy(l->words + l->num_words, words, count * sizeof *words);
    entry->words = count;
    entry->first = l->num_words;
    entry->site = site;
    l->num_words += count;
    l->used++;
    return 0;
}

/* The type. */

static PyObject *make_lookup(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct lookup *l = (struct lookup *)PyType_GenericAlloc(type, 0);
    if (!l)
        return NULL;
    l->kept = PyList_New(0);
    if (!l->kept || grow_entries(l))
        Py_CLEAR(l);
    return (PyObject *)l;
}

static int traverse_lookup(PyObject *self, visitproc visit, void *arg)
{
    struct lookup *const l = (struct lookup *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(l->kept);
    for (int64_t each = 0; each < l->num_sites; each++) {
        Py_VISIT(l->sites[each].object);
        Py_VISIT(l->sites[each].build);
        Py_VISIT(l->sites[each].parts);
    }
    return 0;
}

static int clear_lookup(PyObject *self)
{
    struct lookup *const l = (struct lookup *)self;
    Py_CLEAR(l->kept);
    for (int64_t each = 0; each < l->num_sites; each++)
        clear_site(l->sites + each);
    return 0;
}

static void free_lookup(PyObject *self)
{
    struct lookup *const l = (struct lookup *)self;
    PyObject_GC_UnTrack(self);
    clear_lookup(self);
    for (int64_t each = 0; each < l->num_sites; each++)
        free(l->sites[each].kinds);
    free(l->sites);
    free(l->entries);
    free(l->words);
    free_object(self);
}

static PyType_Slot slots_of_lookup[] = {
    {Py_tp_new, make_lookup},
    {Py_tp_traverse, traverse_lookup},
    {Py_tp_clear, clear_lookup},
    {Py_tp_dealloc, free_lookup},
    {0, NULL},
};
PyType_Spec spec_of_lookup = {
    .name = "pyg_dynbatch._native.Lookup",
    .basicsize = sizeof(struct lookup),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots_of_lookup,
};
