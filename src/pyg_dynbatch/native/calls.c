/* Calls that models make while they are recorded: each is written as machine words, by which its
   site is looked up; Python is asked only for what is new.

   The words of torch.add(x, 2), where the row type of x has number 5, are

       OBJECT, address of torch.add, LAZY, 5, INTEGER, 2 */

#include "recorder.h"

enum { MOST_ARGUMENTS = 16, MOST_WORDS = 512 };
enum { RECORDED, UNRECORDABLE, UNKNOWN, FAILED }; /* what encoding an argument comes to */

/* What the words of a call begin with; equal words are equal calls. */
enum { LAZY, TUPLE, LIST, SIZE, INTEGER, FLOAT, OBJECT, SLICE, SHARED, NAME, NO_GRAD, OPAQUE, ANY };

/* A call that is being recorded. */
struct call {
    struct recorder *recorder;
    PyObject *target, *arguments[2 * MOST_ARGUMENTS], *names[MOST_ARGUMENTS];
    PyObject *objects[MOST_WORDS], *held[MOST_WORDS]; /* in words by address; new references */
    uint64_t words[MOST_WORDS];
    int32_t reads[MOST_WORDS];
    int is_module, args, kwargs, num_words, num_reads, num_objects, num_held, num_numbers;
    PyObject *stopped; /* the argument of an unknown type */
};

PyObject *not_recorded(void)
{
    return Py_NewRef(Py_NotImplemented);
}

/* Arguments as words. */

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
    const int outcome = push(c, tag, (uint64_t)(uintptr_t)object);
    if (outcome == RECORDED)
        c->objects[c->num_objects++] = object;
    return outcome;
}

/* Keeps a new reference, or NULL with an exception set, until the call is recorded. */
static int hold(struct call *c, PyObject *object)
{
    if (!object)
        return FAILED;
    if (c->num_held == MOST_WORDS) {
        Py_DECREF(object);
        return UNKNOWN;
    }
    c->held[c->num_held++] = object;
    return RECORDED;
}

static int encode_lazy(struct call *c, PyObject *object)
{
    const struct value *value = (struct value *)object;
    if (value->session != (PyObject *)c->recorder) {
        PyObject *own = PyObject_CallMethod((PyObject *)c->recorder, "foreign", "O", object);
        const int outcome = hold(c, own);
        if (outcome != RECORDED)
            return outcome;
        value = (struct value *)own;
    }
    const int outcome = push(c, LAZY, (uint64_t)value->kind);
    if (outcome == RECORDED)
        c->reads[c->num_reads++] = value->number;
    return outcome;
}

static int encode(struct call *c, PyObject *argument, int depth);

static int encode_items(struct call *c, uint64_t tag, PyObject *items, int depth)
{
    const int is_list = tag == LIST;
    const Py_ssize_t size = is_list ? PyList_Size(items) : PyTuple_Size(items);
    if (depth == 2 && tag != SIZE)
        return UNRECORDABLE; /* a tree, rather than a state */
    int outcome = push(c, tag, (uint64_t)size);
    for (Py_ssize_t each = 0; outcome == RECORDED && each < size; each++) {
        PyObject *item = is_list ? PyList_GetItem(items, each) : PyTuple_GetItem(items, each);
        outcome = item ? encode(c, item, depth + 1) : FAILED;
    }
    return outcome;
}

static int encode_slice(struct call *c, PyObject *slice)
{
    const char *const names[] = {"start", "stop", "step"};
    int outcome = push(c, SLICE, 0);
    for (int each = 0; outcome == RECORDED && each < COUNT(names); each++) {
        PyObject *bound = PyObject_GetAttrString(slice, names[each]);
        outcome = hold(c, bound);
        if (outcome == RECORDED)
            outcome = bound == Py_None || PyLong_CheckExact(bound) ? encode(c, bound, 2) : UNKNOWN;
    }
    return outcome;
}

/* Finds the number of a parameter or buffer that was met before and is as it was, or -1. */
static int find_operand(const struct recorder *r, PyObject *tensor, int64_t *number)
{
    static PyObject *name;
    PyObject *address = PyLong_FromVoidPtr(tensor);
    if (!address)
        return -1;
    PyObject *met = PyDict_GetItemWithError(r->met, address);
    Py_DECREF(address);
    *number = -1;
    if (!met)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *needs_grad = attribute_of(tensor, &name, "requires_grad");
    if (!needs_grad)
        return -1;
    if (needs_grad == PyTuple_GetItem(met, 1))
        *number = PyLong_AsLongLong(PyTuple_GetItem(met, 0));
    Py_DECREF(needs_grad);
    return PyErr_Occurred() ? -1 : 0;
}

/* A tensor is a parameter or buffer, a row from outside, or not recordable. */
static int encode_tensor(struct call *c, PyObject *tensor, int depth)
{
    struct recorder *const r = c->recorder;
    PyObject *row = NULL;
    int64_t number;
    if (find_operand(r, tensor, &number))
        return FAILED;
    if (number >= 0)
        return push(c, SHARED, (uint64_t)number);
    const int can_be_row = !depth || !c->is_module;
    if (can_be_row && find_row(r, tensor, &row))
        return FAILED;
    if (!row)
        row = PyObject_CallMethod((PyObject *)r, "operand_of", "OOi", tensor, c->target, depth);
    const int outcome = hold(c, row);
    if (outcome != RECORDED)
        return outcome;
    if (row == Py_None)
        return UNRECORDABLE;
    if ((PyObject *)Py_TYPE(row) == known.lazy)
        return encode_lazy(c, row);
    number = PyLong_AsLongLong(row);
    return number == -1 && PyErr_Occurred() ? FAILED : push(c, SHARED, (uint64_t)number);
}

static int encode_integer(struct call *c, PyObject *integer)
{
    int is_large;
    c->num_numbers++;
    const int64_t number = PyLong_AsLongLongAndOverflow(integer, &is_large);
    return is_large ? UNKNOWN : push(c, INTEGER, (uint64_t)number);
}

static int encode_float(struct call *c, PyObject *object)
{
    const double number = PyFloat_AsDouble(object);
    uint64_t bits;
    c->num_numbers++;
    memcpy(&bits, &number, sizeof bits);
    return push(c, FLOAT, bits);
}

static int encode(struct call *c, PyObject *argument, int depth)
{
    PyTypeObject *const type = Py_TYPE(argument);
    if ((PyObject *)type == known.lazy)
        return encode_lazy(c, argument);
    if (argument == Py_None || type == &PyBool_Type || type == &PyUnicode_Type)
        return push_object(c, OBJECT, argument);
    if (type == &PyLong_Type)
        return encode_integer(c, argument);
    if (type == &PyFloat_Type)
        return encode_float(c, argument);
    if (type == &PyTuple_Type || type == &PyList_Type)
        return encode_items(c, type == &PyTuple_Type ? TUPLE : LIST, argument, depth);
    if (type == &PySlice_Type)
        return encode_slice(c, argument);
    if ((PyObject *)type == known.tensor || (PyObject *)type == known.parameter)
        return encode_tensor(c, argument, depth);
    if ((PyObject *)type == known.size)
        return encode_items(c, SIZE, argument, depth);
    const int is_constant = PySet_Contains(known.constants, (PyObject *)type);
    if (is_constant)
        return is_constant < 0 ? FAILED : push_object(c, OBJECT, argument);
    c->stopped = depth ? NULL : argument;
    return UNKNOWN;
}

static int encode_call(struct call *c)
{
    c->num_words = 0;
    c->num_reads = 0;
    c->num_objects = 0;
    c->num_numbers = 0;
    c->stopped = NULL;
    int outcome = push_object(c, OBJECT, c->target);
    const int is_grad = is_true(known.grad_enabled);
    if (is_grad < 0)
        return FAILED;
    if (is_grad != c->recorder->grad)
        outcome = push(c, NO_GRAD, 0);
    for (int each = 0; outcome == RECORDED && each < c->args + c->kwargs; each++) {
        if (each >= c->args)
            outcome = push_object(c, NAME, c->names[each - c->args]);
        if (outcome == RECORDED)
            outcome = encode(c, c->arguments[each], 0);
    }
    return outcome;
}

/* Calls by their words. */

/* Calls a method of the session with the target and the arguments of a call. */
static PyObject *ask(struct call *c, const char *name)
{
    PyObject *args = PyTuple_New(c->args), *kwargs = args ? PyDict_New() : NULL, *answer = NULL;
    int failed = !kwargs;
    for (int each = 0; !failed && each < c->args; each++)
        failed = PyTuple_SetItem(args, each, Py_NewRef(c->arguments[each]));
    for (int each = 0; !failed && each < c->kwargs; each++)
        failed = PyDict_SetItem(kwargs, c->names[each], c->arguments[c->args + each]);
    if (!failed)
        answer = PyObject_CallMethod((PyObject *)c->recorder, name, "OOO", c->target, args, kwargs);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return answer;
}

/* Lets Python record a call that has arguments of other types. */
static PyObject *record_otherwise(struct call *c)
{
    struct recorder *const r = c->recorder;
    struct lookup *const l = (struct lookup *)r->lookup;
    PyObject *const type = c->stopped ? (PyObject *)Py_TYPE(c->stopped) : NULL;
    const uint64_t words[] = {OPAQUE, (uint64_t)(uintptr_t)c->target, (uint64_t)(uintptr_t)type};
    const int is_object =
        c->is_module && c->stopped && !PyTuple_Check(c->stopped) && !PyDict_Check(c->stopped);
    if (is_object && find_entry(l, words, COUNT(words))->words)
        return not_recorded();
    set_reference(&r->refused, NULL);
    PyObject *result = ask(c, "call_otherwise");
    if (result == Py_NotImplemented && is_object && r->refused == c->stopped) {
        PyObject *const objects[] = {c->target, type};
        if (add_entry(l, words, COUNT(words), OPEN, objects, COUNT(objects)))
            Py_CLEAR(result);
    }
    set_reference(&r->refused, NULL);
    return result;
}

/* The words of a call whatever its numbers are; returns how many. */
static int words_without_numbers(const struct call *c, uint64_t *words)
{
    words[0] = ANY;
    words[1] = 0;
    for (int each = 0; each < c->num_words; each += 2) {
        const uint64_t tag = c->words[each];
        words[each + 2] = tag;
        words[each + 3] = tag == INTEGER || tag == FLOAT ? 0 : c->words[each + 1];
    }
    return c->num_words + 2;
}

/* Whether the numbers of a call are data, as they have varied before. */
static int numbers_vary(const struct call *c)
{
    uint64_t words[MOST_WORDS + 2];
    const int count = words_without_numbers(c, words);
    return find_entry((struct lookup *)c->recorder->lookup, words, count)->words != 0;
}

/* The site of a call whose words are new; OPEN, VARIES, or FAILED_SITE with an exception set. */
static int64_t new_site(struct call *c)
{
    struct lookup *const l = (struct lookup *)c->recorder->lookup;
    uint64_t words[MOST_WORDS + 2];
    if (!c->num_reads && c->is_module)
        return OPEN;
    PyObject *object = ask(c, "find");
    if (!object)
        return FAILED_SITE;
    if (object == Py_NotImplemented) {
        Py_DECREF(object);
        return OPEN;
    }
    const int64_t number = add_site(l, object);
    Py_DECREF(object);
    int failed = 0;
    if (number == VARIES)
        failed = add_entry(l, words, words_without_numbers(c, words), number, c->objects,
                           c->num_objects);
    else if (number != FAILED_SITE)
        failed = add_entry(l, c->words, c->num_words, number, c->objects, c->num_objects);
    return failed ? FAILED_SITE : number;
}

/* Puts values in place of the numbers among the arguments of a call, and encodes it again. */
static int encode_with_rows(struct call *c)
{
    PyObject *const session = (PyObject *)c->recorder;
    PyObject *kinds = PyTuple_New(c->num_reads);
    int outcome = kinds ? RECORDED : FAILED, at = 0;
    for (int each = 0; outcome == RECORDED && each < c->num_words; each += 2)
        if (c->words[each] == LAZY) {
            PyObject *kind = PyLong_FromUnsignedLongLong(c->words[each + 1]);
            outcome = kind && !PyTuple_SetItem(kinds, at++, kind) ? RECORDED : FAILED;
        }
    for (int each = 0; outcome == RECORDED && each < c->args + c->kwargs; each++) {
        PyObject *const argument = c->arguments[each];
        if (!PyFloat_CheckExact(argument) && !PyLong_CheckExact(argument))
            continue;
        c->arguments[each] = PyObject_CallMethod(session, "number_row", "OO", argument, kinds);
        outcome = hold(c, c->arguments[each]);
    }
    Py_XDECREF(kinds);
    return outcome == RECORDED ? encode_call(c) : outcome;
}

static PyObject *record_encoded(struct call *c)
{
    struct lookup *const l = (struct lookup *)c->recorder->lookup;
    int64_t number = VARIES;
    if (!c->num_numbers || c->is_module || !numbers_vary(c)) {
        const struct entry *const entry = find_entry(l, c->words, c->num_words);
        number = entry->words ? entry->site : new_site(c);
    }
    if (number == VARIES) {
        const int outcome = encode_with_rows(c);
        if (outcome != RECORDED)
            return outcome == FAILED ? NULL : record_otherwise(c);
        const struct entry *const entry = find_entry(l, c->words, c->num_words);
        number = entry->words ? entry->site : new_site(c);
    }
    if (number < 0)
        return number == OPEN ? not_recorded() : NULL;
    const struct site *const site = l->sites + number;
    if (site->reads != c->num_reads) /* a parameter that Python took for a row */
        return ask(c, "call_otherwise");
    const int is_same = is_unchanged(site);
    if (is_same < 0)
        return NULL;
    if (!is_same) {
        PyObject *const session = (PyObject *)c->recorder;
        PyObject *done = PyObject_CallMethod(session, "check_parts", "O", site->object);
        if (!done)
            return NULL;
        Py_DECREF(done);
    }
    return append_record(c->recorder, number, c->reads, c->num_reads, c->reads, c->num_reads);
}

static PyObject *record_call(struct call *c)
{
    PyObject *result = NULL;
    if (check_lookup(c->recorder))
        return NULL;
    c->num_held = 0;
    const int outcome = encode_call(c);
    if (outcome == RECORDED)
        result = record_encoded(c);
    else if (outcome != FAILED)
        result = record_otherwise(c);
    while (c->num_held)
        Py_DECREF(c->held[--c->num_held]);
    return result;
}

static PyObject *record_many(PyObject *recorder, PyObject *target, PyObject *args, PyObject *kwargs)
{
    PyObject *none = kwargs ? NULL : PyDict_New();
    if (!kwargs && !none)
        return NULL;
    PyObject *result = PyObject_CallMethod(recorder, "call_otherwise", "OOO", target, args,
                                           kwargs ? kwargs : none);
    Py_XDECREF(none);
    return result;
}

PyObject *record_tuple(PyObject *recorder, PyObject *target, PyObject *args, PyObject *kwargs)
{
    const Py_ssize_t num_args = PyTuple_Size(args), num_kwargs = kwargs ? PyDict_Size(kwargs) : 0;
    if (num_args < 0 || num_kwargs < 0)
        return NULL;
    if (num_args > MOST_ARGUMENTS || num_kwargs > MOST_ARGUMENTS)
        return record_many(recorder, target, args, kwargs);
    struct call c;
    PyObject *name, *value;
    Py_ssize_t place = 0;
    c.recorder = (struct recorder *)recorder;
    c.target = target;
    c.args = (int)num_args;
    c.kwargs = 0;
    for (int each = 0; each < c.args; each++)
        c.arguments[each] = PyTuple_GetItem(args, each);
    while (kwargs && PyDict_Next(kwargs, &place, &name, &value)) {
        c.names[c.kwargs] = name;
        c.arguments[c.args + c.kwargs] = value;
        c.kwargs++;
    }
    c.is_module = PyObject_IsInstance(target, known.module);
    return c.is_module < 0 ? NULL : record_call(&c);
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
    c.arguments[0] = left;
    c.arguments[1] = right;
    c.is_module = 0;
    return record_call(&c);
}

PyObject *record_module(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const Py_ssize_t num_names = names ? PyTuple_Size(names) : 0;
    struct call c;
    if (count + num_names > MOST_ARGUMENTS)
        return not_recorded();
    c.recorder = (struct recorder *)active;
    c.target = module;
    c.args = (int)count;
    c.kwargs = (int)num_names;
    for (Py_ssize_t each = 0; each < count + num_names; each++)
        c.arguments[each] = args[each];
    for (Py_ssize_t each = 0; each < num_names; each++)
        c.names[each] = PyTuple_GetItem(names, each);
    c.is_module = 1;
    return record_call(&c);
}
