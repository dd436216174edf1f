/* The table of sites by the words of their calls. */

#include "recorder.h"
#include <stdlib.h>

enum { MOST_ENTRIES = 1 << 16 };

void *grown(void *array, int64_t wanted, int64_t *room, size_t width)
{
    if (wanted <= *room)
        return array;
    int64_t more = *room < 64 ? 64 : *room;
    while (more < wanted)
        more *= 2;
    void *found = realloc(array, more * width);
    if (found)
        *room = more;
    else
        PyErr_NoMemory();
    return found;
}

static int64_t integer_of(PyObject *owner, const char *name)
{
    PyObject *found = PyObject_GetAttrString(owner, name);
    const int64_t number = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return number;
}

int64_t add_site(struct lookup *l, PyObject *object)
{
    struct site site = {.object = object};
    const int64_t number = integer_of(object, "number");
    if (PyErr_Occurred())
        return FAILED_SITE;
    if (number < 0)
        return OPEN;
    if (number < l->num_numbers && l->of_number[number] >= 0)
        return l->of_number[number];
    int64_t room = l->num_numbers;
    int64_t *const of_number = grown(l->of_number, number + 1, &room, sizeof *of_number);
    struct site *const sites = realloc(l->sites, (l->num_sites + 1) * sizeof *sites);
    l->of_number = of_number ? of_number : l->of_number;
    l->sites = sites ? sites : l->sites;
    for (; of_number && l->num_numbers < room; l->num_numbers++)
        of_number[l->num_numbers] = -1;
    PyObject *kinds = PyObject_GetAttrString(object, "kinds");
    PyObject *gradient = PyObject_GetAttrString(object, "gradient");
    site.build = PyObject_GetAttrString(object, "build");
    site.parts = PyObject_GetAttrString(object, "parts");
    const int64_t results = kinds ? PyTuple_Size(kinds) : -1;
    site.kinds = malloc((results + 1) * sizeof *site.kinds);
    const int is_ready = of_number && sites && kinds && gradient && site.build && site.parts &&
                         results >= 0 && site.kinds;
    for (int64_t each = 0; is_ready && each < results; each++)
        site.kinds[each] = (int32_t)PyLong_AsLong(PyTuple_GetItem(kinds, each));
    site.gradient = gradient == Py_None ? -1 : gradient == Py_True;
    site.reads = (int32_t)integer_of(object, "num_reads");
    Py_XDECREF(kinds);
    Py_XDECREF(gradient);
    if (!is_ready || PyErr_Occurred()) {
        free(site.kinds);
        Py_XDECREF(site.build);
        Py_XDECREF(site.parts);
        return PyErr_Occurred() ? FAILED_SITE : (PyErr_NoMemory(), FAILED_SITE);
    }
    site.number = (int32_t)number;
    site.results = (int32_t)results;
    Py_INCREF(object);
    l->sites[l->num_sites] = site;
    return of_number[number] = l->num_sites++;
}

static uint64_t hash_of(const uint64_t *words, int64_t count)
{
    uint64_t hash = 1469598103934665603u;
    for (int64_t each = 0; each < count; each++) {
        hash = (hash ^ words[each]) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return hash ^ hash >> 32;
}

struct entry *find_entry(const struct lookup *l, const uint64_t *words, int64_t count)
{
    const uint64_t hash = hash_of(words, count);
    if (!l->entries)
        return NULL;
    for (int64_t at = (int64_t)hash & l->mask;; at = (at + 1) & l->mask) {
        struct entry *found = l->entries + at;
        if (!found->words)
            found->hash = hash;
        else if (found->hash != hash || found->words != count ||
                 memcmp(l->words + found->first, words, count * sizeof *words))
            continue;
        return found;
    }
}

static int grow_entries(struct lookup *l)
{
    const int64_t before = l->entries ? l->mask + 1 : 0;
    if (l->used >= MOST_ENTRIES) { /* texts and objects that are new at each call */
        memset(l->entries, 0, before * sizeof *l->entries);
        l->used = l->num_words = 0;
        return PyList_SetSlice(l->kept, 0, PyList_Size(l->kept), NULL);
    }
    if (2 * l->used < before)
        return 0;
    struct entry *const old = l->entries, *const entries = calloc(2 * before + 64, sizeof *entries);
    if (!entries) {
        PyErr_NoMemory();
        return -1;
    }
    l->mask = (before ? 2 * before : 64) - 1;
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
    struct entry *entry = find_entry(l, words, count);
    memcpy(l->words + l->num_words, words, count * sizeof *words);
    entry->words = count;
    entry->first = l->num_words;
    entry->site = site;
    l->num_words += count;
    l->used++;
    return 0;
}

static PyObject *make_lookup(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct lookup *made = (struct lookup *)PyType_GenericAlloc(type, 0);
    if (made && (!(made->kept = PyList_New(0)) || grow_entries(made)))
        Py_CLEAR(made);
    return (PyObject *)made;
}

static void free_lookup(PyObject *self)
{
    struct lookup *const l = (struct lookup *)self;
    for (int64_t each = 0; each < l->num_sites; each++) {
        Py_DECREF(l->sites[each].object);
        Py_DECREF(l->sites[each].build);
        Py_DECREF(l->sites[each].parts);
        free(l->sites[each].kinds);
    }
    free(l->sites);
    free(l->of_number);
    free(l->entries);
    free(l->words);
    Py_CLEAR(l->kept);
    free_object(self);
}

static PyType_Slot slots_of_lookup[] = {
    {Py_tp_new, make_lookup}, {Py_tp_dealloc, free_lookup}, {0, NULL},
};
PyType_Spec spec_of_lookup = {
    "pyg_dynbatch._native.Lookup", sizeof(struct lookup), 0, Py_TPFLAGS_DEFAULT, slots_of_lookup,
};
