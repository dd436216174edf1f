/* The records of a session of autobatch, and whether gradients flow back from each value.

   A record is the number of a site, then what its call reads; it takes as many integers as the call
   has results at least, filled up with -1. If site 0 is a row from outside, site 1 adds two rows
   and site 2 splits one into three, then x + x and its parts are recorded as

       0 0   1 0 0   2 2 -1

   for row 0 from outside, of which the value is numbered 0, their sum 2, and the parts 5, 6, 7. */

#include "recorder.h"
#include <stdlib.h>

void set_reference(PyObject **place, PyObject *reference)
{
    PyObject *const before = *place;
    *place = reference;
    Py_XDECREF(before);
}

void free_object(PyObject *self)
{
    PyTypeObject *const type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

int is_true(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    if (!answer)
        return -1;
    const int is = answer == Py_True;
    Py_DECREF(answer);
    return is;
}

int32_t *integers_of(PyObject *sequence, Py_ssize_t *count)
{
    *count = PySequence_Size(sequence);
    if (*count < 0)
        return NULL;
    int32_t *const integers = malloc((size_t)(*count + 1) * sizeof *integers);
    if (!integers)
        return (int32_t *)PyErr_NoMemory();
    for (Py_ssize_t each = 0; each < *count; each++) {
        PyObject *item = PySequence_GetItem(sequence, each);
        const int64_t integer = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if ((integer < INT32_MIN || integer > INT32_MAX) && !PyErr_Occurred())
            PyErr_Format(PyExc_OverflowError, "%lld has more than 32 bits", (long long)integer);
        if (integer < 0 && PyErr_Occurred()) {
            free(integers);
            return NULL;
        }
        integers[each] = (int32_t)integer;
    }
    return integers;
}

/* Records. */

int are_values(const struct recorder *r, const int32_t *numbers, int64_t count)
{
    for (int64_t each = 0; each < count; each++)
        if (numbers[each] < 0 || numbers[each] >= r->base + r->size) {
            PyErr_Format(PyExc_ValueError, "there is no value %d", (int)numbers[each]);
            return 0;
        }
    return 1;
}

/* At the maximum the number of objects stays, as it is no longer known. */
void count_alive(const struct recorder *r, int64_t number, int more)
{
    if (number < r->flags_room && r->alive[number] < UINT8_MAX)
        r->alive[number] = (uint8_t)(r->alive[number] + more);
}

static PyObject *new_value(struct recorder *r, int64_t number, int32_t kind)
{
    PyTypeObject *const type = (PyTypeObject *)known.lazy;
    struct value *const value = (struct value *)PyType_GenericAlloc(type, 0);
    if (!value)
        return NULL;
    value->session = Py_NewRef((PyObject *)r);
    value->number = (int32_t)number;
    value->kind = kind;
    count_alive(r, number, 1);
    return (PyObject *)value;
}

/* Makes room for integers, and for what is known of as many values. */
static int make_room(struct recorder *r, int64_t integers)
{
    const int64_t size = r->size + integers, values = r->base + size, before = r->flags_room;
    if (values > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more than 2 ** 31 - 1 integers were recorded");
        return -1;
    }
    int64_t place_room = r->room, flags_room = before, alive_room = before;
    int32_t *const place = grown(r->place, size, &place_room, sizeof *place);
    if (!place)
        return -1;
    r->place = place;
    int32_t *const code = grown(r->code, size, &r->room, sizeof *code);
    if (!code)
        return -1;
    r->code = code;
    uint8_t *const flags = grown(r->flags, values, &flags_room, sizeof *flags);
    if (!flags)
        return -1;
    r->flags = flags;
    uint8_t *const alive = grown(r->alive, values, &alive_room, sizeof *alive);
    if (!alive)
        return -1;
    r->alive = alive;
    memset(alive + before, 0, alive_room - before);
    r->flags_room = alive_room;
    return 0;
}

int is_watched(const struct recorder *r)
{
    return r->watcher && r->watcher != Py_None;
}

/* The frame that is running, or its caller if that is the function of the mode that watches; None
   if there is none, NULL with an exception set. */
static PyObject *frame_of_user(const struct recorder *r)
{
    static PyObject *name;
    PyFrameObject *const frame = PyEval_GetFrame();
    if (!frame)
        return Py_NewRef(Py_None);
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    const int is_watcher = is_watched(r) && code == r->watcher;
    Py_DECREF(code);
    return is_watcher ? attribute_of((PyObject *)frame, &name, "f_back")
                      : Py_NewRef((PyObject *)frame);
}

/* A number for the instruction of Python that is running; -1 with an exception set. */
static int64_t place_of_code(const struct recorder *r)
{
    static PyObject *name;
    PyObject *frame = frame_of_user(r);
    if (!frame)
        return -1;
    int64_t instruction = 0;
    uint64_t hash = 0;
    if (frame != Py_None) {
        PyObject *last = attribute_of(frame, &name, "f_lasti");
        instruction = last ? PyLong_AsLongLong(last) : -1;
        Py_XDECREF(last);
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        hash = (uint64_t)(uintptr_t)code * UINT64_C(1099511628211);
        hash += (uint64_t)instruction * UINT64_C(0x9E3779B97F4A7C15);
        Py_DECREF(code);
    }
    Py_DECREF(frame);
    return instruction == -1 && PyErr_Occurred() ? -1 : (int64_t)(hash >> 33);
}

/* What a call returns: one value, or what its site builds of several. */
static PyObject *results_of(struct recorder *r, const struct site *site, int64_t first)
{
    if (site->build == Py_None)
        return new_value(r, first, site->kinds[0]);
    PyObject *values = PyTuple_New(site->results);
    for (int32_t each = 0; values && each < site->results; each++) {
        PyObject *value = new_value(r, first + each, site->kinds[each]);
        if (!value || PyTuple_SetItem(values, each, value))
            Py_CLEAR(values);
    }
    if (!values || site->build == (PyObject *)&PyTuple_Type)
        return values;
    PyObject *result = PyObject_CallFunctionObjArgs(site->build, values, NULL);
    Py_DECREF(values);
    return result;
}

PyObject *append_record(struct recorder *r, int64_t number, const int32_t *reads, int64_t num_reads,
                        const int32_t *integers, int64_t num_integers)
{
    const struct site site = ((struct lookup *)r->lookup)->sites[number];
    const int64_t size = 1 + num_integers < site.results ? site.results : 1 + num_integers;
    const int64_t first = r->base + r->size, instruction = place_of_code(r);
    const int is_cast = instruction < 0 ? -1 : is_true(known.autocast_enabled);
    if (is_cast < 0 || make_room(r, size))
        return NULL;
    if (is_cast != r->autocast)
        return PyObject_CallMethod((PyObject *)r, "refuse_switch", NULL);
    int needs_grad = site.gradient;
    for (int64_t each = 0; needs_grad < 0 && each < num_reads; each++)
        if (r->flags[reads[each]] & NEEDS_GRAD)
            needs_grad = 1;
    for (int64_t each = 0; site.is_view && each < num_reads; each++)
        r->flags[reads[each]] |= HAS_VIEWS;
    int32_t *const code = r->code + r->size;
    code[0] = site.number;
    r->place[r->size] = (int32_t)instruction;
    if (num_integers)
        memcpy(code + 1, integers, num_integers * sizeof *code);
    for (int64_t each = 1 + num_integers; each < size; each++)
        code[each] = -1;
    const int flags = (needs_grad > 0 && r->grad ? NEEDS_GRAD : 0) | (site.is_view ? IS_VIEW : 0);
    memset(r->flags + first, flags, size);
    r->flags[first] |= IS_FIRST;
    r->size += size;
    return results_of(r, &site, first);
}

/* The recorder: `Session` of Python is derived from it. */

int check_lookup(const struct recorder *r)
{
    if (r->lookup)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "the recorder was not initialized");
    return -1;
}

static int init_recorder(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct recorder *const r = (struct recorder *)self;
    PyObject *lookup, *root;
    int grad, autocast;
    if (!PyArg_ParseTuple(args, "O!Opp", lookup_type, &lookup, &root, &grad, &autocast))
        return -1;
    PyObject *met = PyDict_New();
    if (!met)
        return -1;
    set_reference(&r->met, met);
    set_reference(&r->lookup, Py_NewRef(lookup));
    set_reference(&r->root, Py_NewRef(root));
    r->grad = (char)grad;
    r->autocast = (char)autocast;
    return 0;
}

static PyObject *call(PyObject *self, PyObject *args)
{
    PyObject *target, *arguments, *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OO!|O", &target, &PyTuple_Type, &arguments, &kwargs))
        return NULL;
    return record_tuple(self, target, arguments, kwargs == Py_None ? NULL : kwargs);
}

/* record(site, reads, code=reads): Append a record of a site and return its results. */
static PyObject *record(PyObject *self, PyObject *args)
{
    struct recorder *const r = (struct recorder *)self;
    PyObject *object, *read, *written = Py_None, *result = NULL;
    Py_ssize_t num_reads = 0, num_integers = 0;
    if (!PyArg_ParseTuple(args, "OO|O", &object, &read, &written) || check_lookup(r))
        return NULL;
    const int64_t site = add_site((struct lookup *)r->lookup, object);
    if (site == OPEN)
        PyErr_SetString(PyExc_ValueError, "calls of open modules are not recorded");
    int32_t *const reads = site < 0 ? NULL : integers_of(read, &num_reads);
    int32_t *const code =
        reads ? integers_of(written == Py_None ? read : written, &num_integers) : NULL;
    if (code && are_values(r, reads, num_reads))
        result = append_record(r, site, reads, num_reads, code, num_integers);
    free(reads);
    free(code);
    return result;
}

/* row_of(tensor): The value of a tensor from outside, or None if only Python can tell. */
static PyObject *row_of(PyObject *self, PyObject *tensor)
{
    PyObject *row = NULL;
    if ((PyObject *)Py_TYPE(tensor) == known.tensor &&
        find_row((struct recorder *)self, tensor, &row))
        return NULL;
    return row ? row : Py_NewRef(Py_None);
}

/* extend(code, places): Append records that need no gradient. */
static PyObject *extend(PyObject *self, PyObject *args)
{
    struct recorder *const r = (struct recorder *)self;
    Py_buffer code, places;
    if (!PyArg_ParseTuple(args, "y*y*", &code, &places))
        return NULL;
    const int64_t integers = code.len / (int64_t)sizeof *r->code;
    int failed = places.len != code.len;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "not one place per integer");
    else
        failed = make_room(r, integers);
    if (!failed && integers) {
        memcpy(r->code + r->size, code.buf, integers * sizeof *r->code);
        memcpy(r->place + r->size, places.buf, integers * sizeof *r->place);
        memset(r->flags + r->base + r->size, 0, integers);
        r->size += integers;
    }
    PyBuffer_Release(&code);
    PyBuffer_Release(&places);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* The integers of one kind from a value on, by default all since the last flush. */
static PyObject *integers_from(const struct recorder *r, const int32_t *integers, PyObject *args)
{
    long long first = r->base;
    if (!PyArg_ParseTuple(args, "|L", &first))
        return NULL;
    if (first < r->base || first > r->base + r->size)
        return PyErr_Format(PyExc_ValueError, "there are no integers from %lld on", first);
    const int64_t skipped = first - r->base;
    return PyBytes_FromStringAndSize(integers ? (const char *)(integers + skipped) : NULL,
                                     (r->size - skipped) * (Py_ssize_t)sizeof *integers);
}

static PyObject *recorded(PyObject *self, PyObject *args)
{
    const struct recorder *const r = (struct recorder *)self;
    return integers_from(r, r->code, args);
}

static PyObject *places(PyObject *self, PyObject *args)
{
    const struct recorder *const r = (struct recorder *)self;
    return integers_from(r, r->place, args);
}

static PyObject *clear(PyObject *self, PyObject *none)
{
    struct recorder *const r = (struct recorder *)self;
    r->base += r->size;
    r->size = 0;
    Py_RETURN_NONE;
}

static PyObject *alive(PyObject *self, PyObject *none)
{
    struct recorder *const r = (struct recorder *)self;
    return PyBytes_FromStringAndSize((char *)r->alive, r->base + r->size);
}

/* The flags of a value; NULL with an exception set if there is no such value. */
static uint8_t *flags_of(PyObject *self, PyObject *number)
{
    struct recorder *const r = (struct recorder *)self;
    const int64_t value = PyLong_AsLongLong(number);
    if (value >= 0 && value < r->base + r->size)
        return r->flags + value;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "there is no value %R", number);
    return NULL;
}

/* Whether a value may share memory with one that the model can still use: with one that it was made
   of, or that this was made of. */
static int shares_memory(const struct recorder *r, int64_t number)
{
    const uint8_t flags = r->flags[number];
    if (!(flags & IS_VIEW))
        return 0;
    const struct lookup *const l = (struct lookup *)r->lookup;
    if (!(flags & IS_FIRST) || number < r->base)
        return 1;
    const int32_t *const code = r->code + (number - r->base);
    const struct site *const site = l->sites + code[0];
    for (int32_t each = 1; each <= site->reads; each++)
        if (r->alive[code[each]] || shares_memory(r, code[each]))
            return 1;
    return site->results != 1;
}

static PyObject *is_shared(PyObject *self, PyObject *number)
{
    const struct recorder *const r = (struct recorder *)self;
    const uint8_t *const flags = flags_of(self, number);
    if (!flags)
        return NULL;
    return PyBool_FromLong((*flags & HAS_VIEWS) || shares_memory(r, flags - r->flags));
}

static PyObject *needs_grad(PyObject *self, PyObject *number)
{
    const uint8_t *const flags = flags_of(self, number);
    return flags ? PyBool_FromLong(*flags & NEEDS_GRAD) : NULL;
}

static PyObject *set_needs_grad(PyObject *self, PyObject *number)
{
    uint8_t *const flags = flags_of(self, number);
    if (!flags)
        return NULL;
    *flags |= NEEDS_GRAD;
    Py_RETURN_NONE;
}

static int traverse_recorder(PyObject *self, visitproc visit, void *arg)
{
    struct recorder *const r = (struct recorder *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->lookup);
    Py_VISIT(r->root);
    Py_VISIT(r->refused);
    Py_VISIT(r->numbers);
    Py_VISIT(r->belonging);
    Py_VISIT(r->known);
    Py_VISIT(r->like);
    Py_VISIT(r->outside);
    Py_VISIT(r->next_row);
    Py_VISIT(r->unread);
    Py_VISIT(r->device);
    Py_VISIT(r->watcher);
    Py_VISIT(r->met);
    return 0;
}

static int clear_recorder(PyObject *self)
{
    struct recorder *const r = (struct recorder *)self;
    Py_CLEAR(r->lookup);
    Py_CLEAR(r->root);
    Py_CLEAR(r->refused);
    Py_CLEAR(r->numbers);
    Py_CLEAR(r->belonging);
    Py_CLEAR(r->known);
    Py_CLEAR(r->like);
    Py_CLEAR(r->outside);
    Py_CLEAR(r->next_row);
    Py_CLEAR(r->unread);
    Py_CLEAR(r->device);
    Py_CLEAR(r->watcher);
    Py_CLEAR(r->met);
    return 0;
}

static void free_recorder(PyObject *self)
{
    struct recorder *const r = (struct recorder *)self;
    PyObject_GC_UnTrack(self);
    clear_recorder(self);
    free(r->code);
    free(r->place);
    free(r->flags);
    free(r->alive);
    free_object(self);
}

static PyMemberDef members_of_recorder[] = {
    {"base", T_LONGLONG, offsetof(struct recorder, base), READONLY, NULL},
    {"num_new", T_LONGLONG, offsetof(struct recorder, size), READONLY, NULL},
    {"grad", T_BOOL, offsetof(struct recorder, grad), READONLY, NULL},
    {"autocast", T_BOOL, offsetof(struct recorder, autocast), READONLY, NULL},
    {"root", T_OBJECT, offsetof(struct recorder, root), READONLY, NULL},
    {"numbers", T_OBJECT, offsetof(struct recorder, numbers), 0, NULL},
    {"belonging", T_OBJECT, offsetof(struct recorder, belonging), 0, NULL},
    {"known", T_OBJECT, offsetof(struct recorder, known), 0, NULL},
    {"like", T_OBJECT, offsetof(struct recorder, like), 0, NULL},
    {"outside", T_OBJECT, offsetof(struct recorder, outside), 0, NULL},
    {"next_row", T_OBJECT, offsetof(struct recorder, next_row), 0, NULL},
    {"unread", T_OBJECT, offsetof(struct recorder, unread), 0, NULL},
    {"device", T_OBJECT, offsetof(struct recorder, device), 0, NULL},
    {"watcher", T_OBJECT, offsetof(struct recorder, watcher), 0, NULL},
    {"met", T_OBJECT, offsetof(struct recorder, met), READONLY, NULL},
    {"refused", T_OBJECT, offsetof(struct recorder, refused), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef methods_of_recorder[] = {
    {"call", call, METH_VARARGS, "Record a call of a target."},
    {"record", record, METH_VARARGS, "Append a record of a site."},
    {"row_of", row_of, METH_O, "The value of a tensor from outside, if it is a simple one."},
    {"extend", extend, METH_VARARGS, "Append records that need no gradient."},
    {"recorded", recorded, METH_VARARGS, "The integers since the last flush, or from a value on."},
    {"places", places, METH_VARARGS, "Where in the user's code each of these was made."},
    {"clear", clear, METH_NOARGS, "Begin a flush."},
    {"alive", alive, METH_NOARGS, "Whether there are objects that stand for each value."},
    {"is_shared", is_shared, METH_O, "Whether a value may share memory with one in use."},
    {"needs_grad", needs_grad, METH_O, "Whether gradients flow back from a value."},
    {"set_needs_grad", set_needs_grad, METH_O, "Let gradients flow back from a value."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots_of_recorder[] = {
    {Py_tp_init, init_recorder},
    {Py_tp_traverse, traverse_recorder},
    {Py_tp_clear, clear_recorder},
    {Py_tp_dealloc, free_recorder},
    {Py_tp_members, members_of_recorder},
    {Py_tp_methods, methods_of_recorder},
    {0, NULL},
};
PyType_Spec spec_of_recorder = {
    .name = "pyg_dynbatch._native.Recorder",
    .basicsize = sizeof(struct recorder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots_of_recorder,
};
