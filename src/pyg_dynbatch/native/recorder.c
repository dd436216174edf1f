/* Records the calls of models of autobatch. autobatch/recorder.py says what this computes; here,
   calls are looked up by machine words, and Python is asked only for what is new. */

#include "recorder.h"
#include <stdlib.h>

enum { MOST_ARGUMENTS = 16, MOST_WORDS = 512 };
enum { RECORDED, UNRECORDABLE, UNKNOWN, FAILED }; /* what encoding an argument comes to */
enum { NEEDS_GRAD = 1 };

#ifdef _MSC_VER
#define NOINLINE __declspec(noinline)
#else
#define NOINLINE __attribute__((noinline))
#endif

/* What the words of a call begin with; equal words are equal calls. */
enum { LAZY, TUPLE, LIST, SIZE, INTEGER, FLOAT, OBJECT, SLICE, SHARED, NAME, NO_GRAD, OPAQUE };

struct known known;
PyObject *recorder_type, *function_type;
_Thread_local PyObject *active;

static const struct field fields_of_known[] = {
    FIELD(known, lazy), FIELD(known, tensor), FIELD(known, parameter), FIELD(known, size),
    FIELD(known, constants), FIELD(known, module), FIELD(known, like), FIELD(known, metadata),
    FIELD(known, grad_enabled), FIELD(known, autocast_enabled), FIELD(known, call_module),
    FIELD(known, no_session), FIELD(known, answer), FIELD(known, operators),
    FIELD(known, zero), FIELD(known, is_wrapped),
};

/* A call that is being recorded. */
struct call {
    struct recorder *recorder;
    PyObject *target, *given[2 * MOST_ARGUMENTS], *names[MOST_ARGUMENTS];
    PyObject *objects[MOST_WORDS], *held[MOST_WORDS]; /* in words by address; new references */
    uint64_t words[MOST_WORDS];
    int32_t reads[MOST_WORDS];
    int is_module, args, kwargs, num_words, num_reads, num_objects, num_held;
    PyObject *stopped; /* the argument of an unknown type */
};

static int is_true(PyObject *function)
{
    PyObject *found = PyObject_CallNoArgs(function);
    const int is = found ? found == Py_True : -1;
    Py_XDECREF(found);
    return is;
}

static struct value *new_value(struct recorder *r, int64_t number, int32_t kind)
{
    PyTypeObject *const type = (PyTypeObject *)known.lazy;
    struct value *made = (struct value *)PyType_GenericAlloc(type, 0);
    if (!made)
        return NULL;
    made->session = (PyObject *)r;
    Py_INCREF(made->session);
    made->number = (int32_t)number;
    made->kind = kind;
    if (number < r->flags_room && r->alive[number] < UINT8_MAX)
        r->alive[number]++; /* at the maximum it stays */
    return made;
}

static int make_room(struct recorder *r, int64_t integers)
{
    int32_t *const code = grown(r->code, r->size + integers, &r->room, sizeof *code);
    if (!code)
        return -1;
    r->code = code;
    int32_t *const place = realloc(r->place, r->room * sizeof *place);
    if (!place) {
        PyErr_NoMemory();
        return -1;
    }
    r->place = place;
    const int64_t before = r->flags_room, wanted = r->base + r->size + integers;
    int64_t room = before;
    uint8_t *const flags = grown(r->flags, wanted, &room, 1);
    if (!flags)
        return -1;
    r->flags = flags;
    room = before;
    uint8_t *const alive = grown(r->alive, wanted, &room, 1);
    if (!alive)
        return -1;
    r->alive = alive;
    memset(r->alive + before, 0, room - before);
    r->flags_room = room;
    return 0;
}

static PyObject *results_of(struct recorder *r, const struct site *site, int64_t first)
{
    if (site->build == Py_None)
        return (PyObject *)new_value(r, first, site->kinds[0]);
    const int is_tuple = site->build == (PyObject *)&PyTuple_Type;
    PyObject *made = is_tuple ? PyTuple_New(site->results) : PyList_New(site->results), *built;
    for (int32_t each = 0; made && each < site->results; each++) {
        PyObject *value = (PyObject *)new_value(r, first + each, site->kinds[each]);
        if (!value)
            Py_CLEAR(made);
        else if (is_tuple ? PyTuple_SetItem(made, each, value) : PyList_SetItem(made, each, value))
            Py_CLEAR(made);
    }
    if (!made || is_tuple)
        return made;
    built = PyObject_CallFunctionObjArgs(site->build, made, NULL);
    Py_DECREF(made);
    return built;
}

/* A number for the instruction of Python that is running. */
static int32_t place_of_code(void)
{
    static PyObject *name;
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    if (!frame || !(name || (name = PyUnicode_InternFromString("f_lasti"))))
        return 0;
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    PyObject *found = PyObject_GetAttr(frame, name);
    uint64_t hash = (uint64_t)(uintptr_t)code * 1099511628211u;
    hash += found ? (uint64_t)PyLong_AsLong(found) * 0x9E3779B97F4A7C15u : 0;
    Py_XDECREF(code);
    Py_XDECREF(found);
    return (int32_t)(hash >> 33);
}

/* Appends a record; `integers` is what follows the number of the site. */
static PyObject *append(struct recorder *r, const struct site *site, const int32_t *reads,
                        int64_t num_reads, const int32_t *integers, int64_t num_integers)
{
    const int is_cast = is_true(known.autocast_enabled);
    if (is_cast != r->autocast)
        return is_cast < 0 ? NULL : PyObject_CallMethod((PyObject *)r, "refuse_switch", NULL);
    const int64_t first = r->base + r->size;
    const int64_t size = 1 + num_integers < site->results ? site->results : 1 + num_integers;
    int needs = site->gradient;
    for (int64_t each = 0; needs < 0 && each < num_reads; each++)
        if (r->flags[reads[each]] & NEEDS_GRAD)
            needs = 1;
    if (make_room(r, size))
        return NULL;
    int32_t *const code = r->code + r->size;
    code[0] = site->number;
    r->place[r->size] = place_of_code();
    if (num_integers)
        memcpy(code + 1, integers, num_integers * sizeof *code);
    for (int64_t each = 1 + num_integers; each < size; each++)
        code[each] = -1;
    memset(r->flags + first, needs > 0 && r->grad ? NEEDS_GRAD : 0, size);
    r->size += size;
    return results_of(r, site, first);
}

static int push(struct call *c, uint64_t tag, uint64_t word)
{
    if (c->num_words + 2 > MOST_WORDS)
        return UNKNOWN;
    c->words[c->num_words++] = tag;
    c->words[c->num_words++] = word;
    return RECORDED;
}

static int push_object(struct call *c, uint64_t tag, PyObject *object)
{
    c->objects[c->num_objects++] = object;
    return push(c, tag, (uint64_t)(uintptr_t)object);
}

static int hold(struct call *c, PyObject *object)
{
    if (object)
        c->held[c->num_held++] = object;
    return object && c->num_held < MOST_WORDS ? RECORDED : FAILED;
}

static int encode_lazy(struct call *c, PyObject *object)
{
    struct value *value = (struct value *)object;
    if (value->session != (PyObject *)c->recorder) {
        object = PyObject_CallMethod((PyObject *)c->recorder, "foreign", "O", object);
        if (hold(c, object) != RECORDED)
            return FAILED;
        value = (struct value *)object;
    }
    if (c->num_words + 2 > MOST_WORDS)
        return UNKNOWN;
    c->reads[c->num_reads++] = value->number;
    return push(c, LAZY, (uint64_t)value->kind);
}

static int encode(struct call *c, PyObject *argument, int depth);

static int encode_items(struct call *c, uint64_t tag, PyObject *items, int depth)
{
    const int is_list = tag == LIST;
    const int64_t size = is_list ? PyList_Size(items) : PyTuple_Size(items);
    if (depth == 2 && tag != SIZE)
        return UNRECORDABLE; /* a tree, rather than a state */
    int found = push(c, tag, (uint64_t)size);
    for (int64_t each = 0; found == RECORDED && each < size; each++) {
        PyObject *item = is_list ? PyList_GetItem(items, each) : PyTuple_GetItem(items, each);
        found = encode(c, item, depth + 1);
    }
    return found;
}

static int encode_slice(struct call *c, PyObject *slice)
{
    const char *const names[] = {"start", "stop", "step"};
    int found = push(c, SLICE, 0);
    for (int each = 0; found == RECORDED && each < COUNT(names); each++) {
        PyObject *part = PyObject_GetAttrString(slice, names[each]);
        found = hold(c, part);
        if (found == RECORDED)
            found = part == Py_None || PyLong_CheckExact(part) ? encode(c, part, 2) : UNKNOWN;
    }
    return found;
}

/* The number of a parameter or buffer that was met before and is as it was, or -1. */
static int64_t known_operand(const struct recorder *r, PyObject *tensor, PyObject *address)
{
    static PyObject *name;
    int64_t number = -1;
    PyObject *found = PyDict_GetItem(r->met, address), *needs = NULL;
    if (found && (needs = attribute_of(tensor, &name, "requires_grad")) &&
        needs == PyTuple_GetItem(found, 1))
        number = PyLong_AsLongLong(PyTuple_GetItem(found, 0));
    Py_XDECREF(needs);
    return number;
}

/* Attributes of tensors, and methods without arguments. */
enum { DTYPE, SHAPE, DEVICE, VERSION, BASE, IS_CPU, GRADIENT,
       DIM, ITEM, INFERENCE, STORAGE, RESIZABLE };
static PyObject *fact_of(PyObject *tensor, int fact)
{
    static PyObject *names[RESIZABLE + 1];
    static const char *const texts[] = {
        "dtype", "shape", "device", "_version", "_base", "is_cpu", "requires_grad",
        "dim", "item", "is_inference", "untyped_storage", "resizable",
    };
    PyObject *found = attribute_of(tensor, names + fact, texts[fact]);
    if (!found || fact < DIM)
        return found;
    PyObject *answer = PyObject_CallNoArgs(found);
    Py_DECREF(found);
    return answer;
}

static int fact_is(PyObject *tensor, int fact, PyObject *wanted)
{
    PyObject *found = fact_of(tensor, fact);
    const int is = found && PyObject_RichCompareBool(found, wanted, Py_EQ) == 1;
    Py_XDECREF(found);
    return is;
}

/* Whether a tensor is neither a parameter or buffer of the model nor a view of one. */
static int is_foreign(const struct recorder *r, PyObject *tensor, PyObject *address)
{
    PyObject *base = PyDict_GetItem(r->belonging, address) ? NULL : fact_of(tensor, BASE);
    PyObject *of_base = base && base != Py_None ? PyLong_FromVoidPtr(base) : NULL;
    const int is = base && (base == Py_None || (of_base && !PyDict_GetItem(r->belonging, of_base)));
    Py_XDECREF(base);
    Py_XDECREF(of_base);
    return is;
}

/* The value that stands for a number in a tensor and was met before, or NULL. */
static PyObject *known_number(const struct recorder *r, PyObject *tensor)
{
    PyObject *dtype = fact_of(tensor, DTYPE), *found = NULL;
    PyObject *numbers = dtype ? PyDict_GetItem(r->numbers, dtype) : NULL;
    Py_XDECREF(dtype);
    if (!numbers || !fact_is(tensor, DIM, known.zero) || !fact_is(tensor, IS_CPU, Py_True))
        return NULL;
    PyObject *number = fact_of(tensor, ITEM);
    if (number)
        found = PyDict_GetItem(numbers, number);
    Py_XINCREF(found);
    Py_XDECREF(number);
    return found;
}

/* The value of a tensor from outside that was met before and is as it was, or NULL. */
static PyObject *known_row(const struct recorder *r, PyObject *tensor, PyObject *address)
{
    PyObject *met = PyDict_GetItem(r->known, address), *found = NULL;
    PyObject *version = met ? PyTuple_GetItem(met, 2) : NULL; /* or a copy */
    if (version && PyLong_CheckExact(version) && fact_is(tensor, VERSION, version))
        found = PyTuple_GetItem(met, 0);
    Py_XINCREF(found);
    return found;
}

/* Whether a tensor is on the model's device, needs no gradient, and torch counts its changes. */
static int is_simple(const struct recorder *r, PyObject *tensor)
{
    if (!fact_is(tensor, GRADIENT, Py_False) || !fact_is(tensor, INFERENCE, Py_False) ||
        !fact_is(tensor, DEVICE, r->device))
        return 0;
    PyObject *wrapped = PyObject_CallFunctionObjArgs(known.is_wrapped, tensor, NULL);
    PyObject *storage = wrapped == Py_False ? fact_of(tensor, STORAGE) : NULL;
    const int is = storage && fact_is(storage, RESIZABLE, Py_True);
    Py_XDECREF(wrapped);
    Py_XDECREF(storage);
    return is;
}

/* Records a simple tensor of a known shape and dtype as a row from outside, as Session.outside_row
   does; NULL for all others. */
static PyObject *new_row(struct recorder *r, PyObject *tensor, PyObject *address)
{
    static PyObject *name;
    if (PyDict_GetItem(r->known, address) || fact_is(tensor, DIM, known.zero) ||
        !is_simple(r, tensor))
        return NULL;
    PyObject *shape = fact_of(tensor, SHAPE), *dtype = fact_of(tensor, DTYPE), *value = NULL;
    PyObject *version = fact_of(tensor, VERSION);
    PyObject *key = shape && dtype ? PyTuple_Pack(2, shape, dtype) : NULL;
    PyObject *object = key ? PyDict_GetItem(r->like, key) : NULL;
    PyObject *rows = object ? PyDict_GetItem(r->outside, object) : NULL;
    PyObject *kinds = rows ? attribute_of(object, &name, "kinds") : NULL;
    PyObject *kind = kinds ? PyTuple_GetItem(kinds, 0) : NULL;
    PyObject *next = kind ? PyDict_GetItem(r->next_row, kind) : NULL;
    PyObject *note = next && version ? PyTuple_Pack(2, tensor, version) : NULL;
    const int64_t site = note ? add_site(r->lookup, object) : FAILED_SITE;
    if (site >= 0) {
        const int32_t row = (int32_t)PyLong_AsLong(next);
        PyObject *after = PyLong_FromLong(row + 1L), *met = NULL;
        if (after && !PyDict_SetItem(r->next_row, kind, after) && !PyList_Append(rows, tensor) &&
            !PyList_Append(r->unread, note))
            value = append(r, r->lookup->sites + site, NULL, 0, &row, 1);
        if (value && (!(met = PyTuple_Pack(3, value, tensor, version)) ||
                      PyDict_SetItem(r->known, address, met)))
            Py_CLEAR(value);
        Py_XDECREF(after);
        Py_XDECREF(met);
    }
    PyObject *const held[] = {shape, dtype, version, key, kinds, note};
    for (int each = 0; each < COUNT(held); each++)
        Py_XDECREF(held[each]);
    return value;
}

/* The value of a tensor from outside; NULL, without an exception, if only Python can tell. */
static PyObject *find_row(struct recorder *r, PyObject *tensor, PyObject *address)
{
    if (!r->can_run || !r->known || !is_foreign(r, tensor, address))
        return NULL;
    PyObject *row = known_row(r, tensor, address);
    row = row || PyErr_Occurred() ? row : known_number(r, tensor);
    return row || PyErr_Occurred() ? row : new_row(r, tensor, address);
}

/* A tensor is a row from outside, a parameter or buffer, or not recordable. */
static int encode_tensor(struct call *c, PyObject *tensor, int depth)
{
    struct recorder *const r = c->recorder;
    PyObject *address = PyLong_FromVoidPtr(tensor), *row = NULL;
    const int64_t number = address ? known_operand(r, tensor, address) : -1;
    if (number < 0 && address && !(depth && c->is_module))
        row = find_row(r, tensor, address);
    Py_XDECREF(address);
    if (PyErr_Occurred())
        return FAILED;
    if (number >= 0)
        return push(c, SHARED, (uint64_t)number);
    if (!row)
        row = PyObject_CallMethod((PyObject *)r, "operand_of", "OOi", tensor, c->target, depth);
    if (hold(c, row) != RECORDED)
        return FAILED;
    if ((PyObject *)Py_TYPE(row) == known.lazy)
        return encode_lazy(c, row);
    return row == Py_None ? UNRECORDABLE : push(c, SHARED, PyLong_AsUnsignedLongLong(row));
}

static int encode(struct call *c, PyObject *argument, int depth)
{
    PyTypeObject *const type = Py_TYPE(argument);
    if ((PyObject *)type == known.lazy)
        return encode_lazy(c, argument);
    if (argument == Py_None || type == &PyBool_Type || type == &PyUnicode_Type)
        return push_object(c, OBJECT, argument);
    if (type == &PyLong_Type) {
        int is_large;
        const int64_t number = PyLong_AsLongLongAndOverflow(argument, &is_large);
        return is_large ? UNKNOWN : push(c, INTEGER, (uint64_t)number);
    }
    if (type == &PyFloat_Type) {
        const double number = PyFloat_AsDouble(argument);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return push(c, FLOAT, bits);
    }
    if (type == &PyTuple_Type || type == &PyList_Type)
        return encode_items(c, type == &PyTuple_Type ? TUPLE : LIST, argument, depth);
    if (type == &PySlice_Type)
        return encode_slice(c, argument);
    if ((PyObject *)type == known.tensor || (PyObject *)type == known.parameter)
        return encode_tensor(c, argument, depth);
    if ((PyObject *)type == known.size)
        return encode_items(c, SIZE, argument, depth);
    if (PySet_Contains(known.constants, (PyObject *)type) == 1)
        return push_object(c, OBJECT, argument);
    c->stopped = depth ? NULL : argument;
    return UNKNOWN;
}

static int encode_call(struct call *c)
{
    int found = push_object(c, OBJECT, c->target);
    const int is_grad = is_true(known.grad_enabled);
    if (is_grad < 0)
        return FAILED;
    if (is_grad != c->recorder->grad)
        push(c, NO_GRAD, 0);
    for (int each = 0; found == RECORDED && each < c->args + c->kwargs; each++) {
        if (each >= c->args)
            found = push_object(c, NAME, c->names[each - c->args]);
        if (found == RECORDED)
            found = encode(c, c->given[each], 0);
    }
    return found;
}

/* Calls a method of the session with the target and the arguments of a call. */
static PyObject *ask(struct call *c, const char *name)
{
    PyObject *args = PyTuple_New(c->args), *kwargs = PyDict_New(), *found = NULL;
    int failed = !args || !kwargs;
    for (int each = 0; !failed && each < c->args; each++) {
        Py_INCREF(c->given[each]);
        failed = PyTuple_SetItem(args, each, c->given[each]);
    }
    for (int each = 0; !failed && each < c->kwargs; each++)
        failed = PyDict_SetItem(kwargs, c->names[each], c->given[c->args + each]);
    if (!failed)
        found = PyObject_CallMethod((PyObject *)c->recorder, name, "OOO", c->target, args, kwargs);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return found;
}

PyObject *not_recorded(void)
{
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
}

/* Lets Python record a call that has arguments of other types. */
static PyObject *record_otherwise(struct call *c)
{
    struct lookup *const l = c->recorder->lookup;
    const uint64_t words[] = {OPAQUE, (uint64_t)(uintptr_t)c->target,
                              c->stopped ? (uint64_t)(uintptr_t)Py_TYPE(c->stopped) : 0};
    const int is_object = c->is_module && c->stopped && !PyTuple_Check(c->stopped) &&
                          !PyDict_Check(c->stopped);
    struct entry *entry = is_object ? find_entry(l, words, COUNT(words)) : NULL;
    if (entry && entry->words)
        return not_recorded();
    Py_CLEAR(c->recorder->refused);
    PyObject *found = ask(c, "call_otherwise");
    if (found == Py_NotImplemented && is_object && c->recorder->refused == c->stopped) {
        PyObject *const objects[] = {c->target, (PyObject *)Py_TYPE(c->stopped)};
        if (add_entry(l, words, COUNT(words), OPEN, objects, COUNT(objects)))
            Py_CLEAR(found);
    }
    Py_CLEAR(c->recorder->refused);
    return found;
}

static PyObject *record_encoded(struct call *c)
{
    struct lookup *const l = c->recorder->lookup;
    struct entry *entry = find_entry(l, c->words, c->num_words);
    int64_t site;
    if (entry && entry->words)
        site = entry->site;
    else {
        if (!c->num_reads && c->is_module)
            return not_recorded();
        PyObject *found = ask(c, "find");
        if (!found || found == Py_NotImplemented)
            return found;
        site = add_site(l, found);
        Py_DECREF(found);
        if (site == FAILED_SITE || add_entry(l, c->words, c->num_words, site, c->objects,
                                             c->num_objects))
            return NULL;
    }
    if (site == OPEN)
        return not_recorded();
    if (l->sites[site].reads != c->num_reads) /* a parameter that Python took for a row */
        return ask(c, "call_otherwise");
    const int is_same = is_unchanged(l->sites + site);
    if (is_same < 0)
        return NULL;
    if (!is_same) {
        PyObject *done = PyObject_CallMethod((PyObject *)c->recorder, "check_parts", "O",
                                             l->sites[site].object);
        if (!done)
            return NULL;
        Py_DECREF(done);
    }
    return append(c->recorder, l->sites + site, c->reads, c->num_reads, c->reads, c->num_reads);
}

static PyObject *record_call(struct call *c)
{
    PyObject *result = NULL;
    c->num_words = c->num_reads = c->num_objects = c->num_held = 0;
    c->stopped = NULL;
    const int found = encode_call(c);
    if (found == RECORDED)
        result = record_encoded(c);
    else if (found != FAILED)
        result = record_otherwise(c);
    while (c->num_held)
        Py_DECREF(c->held[--c->num_held]);
    return result;
}

static int too_many(struct call *c, PyObject *args, PyObject *kwargs, PyObject **result)
{
    if (PyTuple_Size(args) <= MOST_ARGUMENTS && (!kwargs || PyDict_Size(kwargs) <= MOST_ARGUMENTS))
        return 0;
    PyObject *none = kwargs ? NULL : PyDict_New();
    *result = PyObject_CallMethod((PyObject *)c->recorder, "call_otherwise", "OOO", c->target, args,
                                  kwargs ? kwargs : none);
    Py_XDECREF(none);
    return 1;
}

PyObject *record_tuple(PyObject *recorder, PyObject *target, PyObject *args, PyObject *kwargs)
{
    struct call c;
    PyObject *name, *value, *result;
    Py_ssize_t place = 0;
    c.recorder = (struct recorder *)recorder;
    c.target = target;
    if (too_many(&c, args, kwargs, &result))
        return result;
    c.args = (int)PyTuple_Size(args);
    c.kwargs = 0;
    for (int each = 0; each < c.args; each++)
        c.given[each] = PyTuple_GetItem(args, each);
    while (kwargs && PyDict_Next(kwargs, &place, &name, &value)) {
        c.names[c.kwargs] = name;
        c.given[c.args + c.kwargs++] = value;
    }
    c.is_module = PyObject_IsInstance(target, known.module) == 1;
    return record_call(&c);
}

PyObject *record_operator(PyObject *target, PyObject *left, PyObject *right)
{
    struct call c;
    if (!active)
        return PyObject_CallFunctionObjArgs(known.no_session, target, NULL);
    c.recorder = (struct recorder *)active;
    c.target = target;
    c.args = right ? 2 : 1;
    c.kwargs = 0;
    c.given[0] = left;
    c.given[1] = right;
    c.is_module = 0;
    return record_call(&c);
}

/* The recorder: `Session` of Python is derived from it. */

static int init_recorder(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct recorder *const r = (struct recorder *)self;
    PyObject *lookup, *root;
    int grad, autocast;
    if (!PyArg_ParseTuple(args, "OOpp", &lookup, &root, &grad, &autocast))
        return -1;
    Py_INCREF(lookup);
    Py_INCREF(root);
    Py_XDECREF((PyObject *)r->lookup);
    Py_XDECREF(r->root);
    if (!r->met && !(r->met = PyDict_New()))
        return -1;
    r->lookup = (struct lookup *)lookup;
    r->root = root;
    r->grad = (char)grad;
    r->autocast = (char)autocast;
    return 0;
}

static PyObject *call(PyObject *self, PyObject *args)
{
    PyObject *target, *given, *kwargs = NULL;
    if (!PyArg_ParseTuple(args, "OO!|O", &target, &PyTuple_Type, &given, &kwargs))
        return NULL;
    return record_tuple(self, target, given, kwargs == Py_None ? NULL : kwargs);
}

/* Copies a sequence of integers; NULL with an exception set if there is none. */
static int32_t *integers_of(PyObject *sequence, Py_ssize_t *count)
{
    *count = PySequence_Size(sequence);
    int32_t *const found = *count < 0 ? NULL : malloc((*count + 1) * sizeof *found);
    for (Py_ssize_t each = 0; found && each < *count; each++) {
        PyObject *item = PySequence_GetItem(sequence, each);
        found[each] = item ? (int32_t)PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
    }
    if (found && !PyErr_Occurred())
        return found;
    free(found);
    return PyErr_Occurred() ? NULL : (int32_t *)PyErr_NoMemory();
}

/* record(site, reads, code=reads): Append a record of a site and return its results. */
static PyObject *record(PyObject *self, PyObject *args)
{
    struct recorder *const r = (struct recorder *)self;
    PyObject *object, *read, *written = Py_None, *result = NULL;
    Py_ssize_t num_reads = 0, num_integers = 0;
    if (!PyArg_ParseTuple(args, "OO|O", &object, &read, &written))
        return NULL;
    int32_t *const reads = integers_of(read, &num_reads);
    int32_t *const code = reads ? integers_of(written == Py_None ? read : written, &num_integers)
                                : NULL;
    const int64_t site = code ? add_site(r->lookup, object) : FAILED_SITE;
    if (site >= 0)
        result = append(r, r->lookup->sites + site, reads, num_reads, code, num_integers);
    free(reads);
    free(code);
    return result;
}

/* row_of(tensor): The value of a tensor from outside, or None if only Python can tell. */
static PyObject *row_of_tensor(PyObject *self, PyObject *tensor)
{
    PyObject *address = PyLong_FromVoidPtr(tensor), *row = NULL;
    if (address && (PyObject *)Py_TYPE(tensor) == known.tensor)
        row = find_row((struct recorder *)self, tensor, address);
    Py_XDECREF(address);
    if (row || PyErr_Occurred())
        return row;
    Py_RETURN_NONE;
}

/* extend(code): Append records that need no gradient. */
static PyObject *extend(PyObject *self, PyObject *given)
{
    struct recorder *const r = (struct recorder *)self;
    Py_buffer view;
    if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE))
        return NULL;
    const int64_t integers = view.len / (int64_t)sizeof *r->code;
    const int failed = make_room(r, integers);
    if (!failed) {
        memcpy(r->code + r->size, view.buf, integers * sizeof *r->code);
        memset(r->flags + r->base + r->size, 0, integers);
        memset(r->place + r->size, 0, integers * sizeof *r->place);
        r->size += integers;
    }
    PyBuffer_Release(&view);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *recorded(PyObject *self, PyObject *none)
{
    struct recorder *const r = (struct recorder *)self;
    return PyBytes_FromStringAndSize((char *)r->code, r->size * (Py_ssize_t)sizeof *r->code);
}

static PyObject *places(PyObject *self, PyObject *none)
{
    struct recorder *const r = (struct recorder *)self;
    return PyBytes_FromStringAndSize((char *)r->place, r->size * (Py_ssize_t)sizeof *r->place);
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

static PyObject *needs_grad(PyObject *self, PyObject *number)
{
    struct recorder *const r = (struct recorder *)self;
    const int64_t value = PyLong_AsLongLong(number);
    return PyBool_FromLong(value >= 0 && value < r->base + r->size && r->flags[value] & NEEDS_GRAD);
}

static PyObject *set_needs_grad(PyObject *self, PyObject *number)
{
    struct recorder *const r = (struct recorder *)self;
    const int64_t value = PyLong_AsLongLong(number);
    if (value >= 0 && value < r->base + r->size)
        r->flags[value] |= NEEDS_GRAD;
    Py_RETURN_NONE;
}

static void free_recorder(PyObject *self)
{
    struct recorder *const r = (struct recorder *)self;
    Py_XDECREF((PyObject *)r->lookup);
    Py_CLEAR(r->root);
    Py_CLEAR(r->refused);
    Py_CLEAR(r->met);
    PyObject **const held[] = {&r->numbers, &r->belonging, &r->known, &r->like, &r->outside,
                               &r->next_row, &r->unread, &r->device};
    for (int each = 0; each < COUNT(held); each++)
        Py_CLEAR(*held[each]);
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
    {"can_run", T_BOOL, offsetof(struct recorder, can_run), 0, NULL},
    {"met", T_OBJECT, offsetof(struct recorder, met), READONLY, NULL},
    {"refused", T_OBJECT, offsetof(struct recorder, refused), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef methods_of_recorder[] = {
    {"call", call, METH_VARARGS, "Record a call of a target."},
    {"record", record, METH_VARARGS, "Append a record of a site."},
    {"row_of", row_of_tensor, METH_O, "The value of a tensor from outside, if it is a simple one."},
    {"extend", extend, METH_O, "Append records that need no gradient."},
    {"recorded", recorded, METH_NOARGS, "The integers since the last flush."},
    {"places", places, METH_NOARGS, "Where in the user's code each record was made."},
    {"clear", clear, METH_NOARGS, "Begin a flush."},
    {"alive", alive, METH_NOARGS, "Whether there are objects that stand for each value."},
    {"needs_grad", needs_grad, METH_O, "Whether gradients flow back from a value."},
    {"set_needs_grad", set_needs_grad, METH_O, "Let gradients flow back from a value."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots_of_recorder[] = {
    {Py_tp_init, init_recorder}, {Py_tp_dealloc, free_recorder},
    {Py_tp_members, members_of_recorder}, {Py_tp_methods, methods_of_recorder}, {0, NULL},
};
static PyType_Spec spec_of_recorder = {
    "pyg_dynbatch._native.Recorder", sizeof(struct recorder), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots_of_recorder,
};

/* Functions of the module. */

static PyObject *setup(PyObject *module, PyObject *args, PyObject *kwargs)
{
    for (int each = 0; each < COUNT(fields_of_known); each++) {
        PyObject **place = (PyObject **)((char *)&known + fields_of_known[each].place);
        PyObject *given = PyDict_GetItemString(kwargs, fields_of_known[each].name);
        if (given) {
            Py_INCREF(given);
            Py_XDECREF(*place);
            *place = given;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *activate(PyObject *module, PyObject *recorder)
{
    PyObject *const before = active;
    active = recorder == Py_None ? NULL : recorder;
    Py_XINCREF(active);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *active_recorder(PyObject *module, PyObject *none)
{
    PyObject *found = active ? active : Py_None;
    Py_INCREF(found);
    return found;
}

/* Calls what a call of a module was before it was intercepted. */
static PyObject *call_original(PyObject *self, PyObject *const *args, Py_ssize_t count,
                               PyObject *names)
{
    const Py_ssize_t num_names = names ? PyTuple_Size(names) : 0;
    PyObject *all = PyTuple_New(count + 1), *kwargs = num_names ? PyDict_New() : NULL;
    PyObject *result = NULL;
    int failed = !all || (num_names && !kwargs);
    for (Py_ssize_t each = 0; !failed && each <= count; each++) {
        PyObject *item = each ? args[each - 1] : self;
        Py_INCREF(item);
        failed = PyTuple_SetItem(all, each, item);
    }
    for (Py_ssize_t each = 0; !failed && each < num_names; each++)
        failed = PyDict_SetItem(kwargs, PyTuple_GetItem(names, each), args[count + each]);
    if (!failed)
        result = PyObject_Call(known.call_module, all, kwargs);
    Py_XDECREF(all);
    Py_XDECREF(kwargs);
    return result;
}

/* Records a call of a module; by itself, as `call` is large and modules call modules. */
static NOINLINE PyObject *record_module(PyObject *module, PyObject *const *args, Py_ssize_t count,
                                        PyObject *names, Py_ssize_t num_names)
{
    struct call c;
    if (count + num_names > MOST_ARGUMENTS)
        return not_recorded();
    c.recorder = (struct recorder *)active;
    c.target = module;
    c.args = (int)count;
    c.kwargs = (int)num_names;
    for (Py_ssize_t each = 0; each < count + num_names; each++)
        c.given[each] = args[each];
    for (Py_ssize_t each = 0; each < num_names; each++)
        c.names[each] = PyTuple_GetItem(names, each);
    c.is_module = 1;
    return record_call(&c);
}

/* `__call__` of modules while models are recorded. */
static PyObject *call_module(PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names)
{
    const Py_ssize_t num_names = names ? PyTuple_Size(names) : 0;
    if (!active || self == ((struct recorder *)active)->root)
        return call_original(self, args, count, names);
    PyObject *result = record_module(self, args, count, names, num_names);
    if (result != Py_NotImplemented)
        return result;
    Py_DECREF(result);
    return call_original(self, args, count, names);
}

static PyMethodDef method_of_modules = {
    "__call__", (PyCFunction)(void (*)(void))call_module, METH_FASTCALL | METH_KEYWORDS,
    "Record a call of a module.",
};

static PyObject *intercepted(PyObject *module, PyObject *kind)
{
    return PyDescr_NewMethod((PyTypeObject *)kind, &method_of_modules);
}

/* `isinstance` while models are recorded: lazy values are tensors. */
static PyObject *is_instance(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "isinstance expected 2 arguments, got %zd", count);
        return NULL;
    }
    const int is_lazy = (PyObject *)Py_TYPE(args[0]) == known.lazy && args[1] != known.lazy;
    const int found = PyObject_IsInstance(is_lazy ? known.like : args[0], args[1]);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

PyMethodDef recorder_functions[] = {
    {"setup", (PyCFunction)(void (*)(void))setup, METH_VARARGS | METH_KEYWORDS,
     "Take the types and functions of Python that recording needs."},
    {"activate", activate, METH_O, "Let a recorder, or None, record on this thread."},
    {"active_recorder", active_recorder, METH_NOARGS, "The recorder of this thread, or None."},
    {"intercepted", intercepted, METH_O, "A method that records calls of a class of modules."},
    {"is_instance", (PyCFunction)(void (*)(void))is_instance, METH_FASTCALL,
     "isinstance for which lazy values are tensors."},
    {NULL, NULL, 0, NULL},
};

extern PyType_Spec spec_of_function, spec_of_lookup, spec_of_snapshot, spec_of_value;

int add_recorder_types(PyObject *module)
{
    PyType_Spec *const specs[] = {&spec_of_value, &spec_of_function, &spec_of_snapshot,
                                  &spec_of_lookup, &spec_of_recorder};
    for (int each = 0; each < COUNT(specs); each++) {
        PyObject *type = PyType_FromSpec(specs[each]);
        if (!type || PyModule_AddType(module, (PyTypeObject *)type))
            return -1;
        if (specs[each] == &spec_of_function)
            Py_INCREF(function_type = type);
        if (specs[each] == &spec_of_recorder)
            Py_INCREF(recorder_type = type);
        Py_DECREF(type);
    }
    return 0;
}
