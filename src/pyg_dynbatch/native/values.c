/* The values of models while they are recorded, and the methods of tensors that they have. */

#include "recorder.h"

/* The numbers of operators in `known.operators`: each with its reflection, and others. */
enum { ADD, SUB, MUL, TRUEDIV, FLOORDIV, MOD, POW, MATMUL, AND, OR, XOR, LSHIFT, RSHIFT };
enum { LT = 2 * (RSHIFT + 1), LE, EQ, NE, GT, GE, NEG, POS, ABS, INVERT, GETITEM };

static PyObject *operator_of(int number, PyObject *left, PyObject *right)
{
    PyObject *target = PyTuple_GetItem(known.operators, number);
    return target == Py_None ? not_recorded() : record_operator(target, left, right);
}

static PyObject *binary(int number, PyObject *left, PyObject *right)
{
    if ((PyObject *)Py_TYPE(left) == known.lazy)
        return operator_of(2 * number, left, right);
    return operator_of(2 * number + 1, right, left);
}

#define BINARY(name, number)                                                                       \
    static PyObject *name##_of(PyObject *left, PyObject *right)                                    \
    {                                                                                              \
        return binary(number, left, right);                                                        \
    }
#define UNARY(name, number)                                                                        \
    static PyObject *name##_of(PyObject *value)                                                    \
    {                                                                                              \
        return operator_of(number, value, NULL);                                                   \
    }
BINARY(add, ADD)
BINARY(sub, SUB)
BINARY(mul, MUL)
BINARY(truediv, TRUEDIV)
BINARY(floordiv, FLOORDIV)
BINARY(mod, MOD)
BINARY(matmul, MATMUL)
BINARY(and, AND)
BINARY(or, OR)
BINARY(xor, XOR)
BINARY(lshift, LSHIFT)
BINARY(rshift, RSHIFT)
UNARY(neg, NEG)
UNARY(pos, POS)
UNARY(abs, ABS)
UNARY(invert, INVERT)

static PyObject *pow_of(PyObject *left, PyObject *right, PyObject *modulus)
{
    return modulus == Py_None ? binary(POW, left, right) : not_recorded();
}

static PyObject *item_of(PyObject *value, PyObject *index)
{
    return operator_of(GETITEM, value, index);
}

/* So that a value is a sequence. */
static PyObject *row_of(PyObject *value, Py_ssize_t number)
{
    PyObject *index = PyLong_FromSsize_t(number), *found = index ? item_of(value, index) : NULL;
    Py_XDECREF(index);
    return found;
}

static PyObject *compare(PyObject *value, PyObject *other, int how)
{
    const int numbers[] = {LT, LE, EQ, NE, GT, GE}; /* in the order of Py_LT, Py_LE, ... */
    if (other == Py_None && (how == Py_EQ || how == Py_NE))
        return not_recorded();
    return operator_of(numbers[how], value, other);
}

static Py_hash_t hash_value(PyObject *value)
{
    return (Py_hash_t)((uintptr_t)value >> 4);
}

static int init_value(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct value *const value = (struct value *)self;
    PyObject *session;
    if (!PyArg_ParseTuple(args, "O!ii", recorder_type, &session, &value->number, &value->kind))
        return -1;
    if (value->number < 0) {
        PyErr_SetString(PyExc_ValueError, "values are numbered from 0");
        return -1;
    }
    Py_INCREF(session);
    Py_XDECREF(value->session);
    value->session = session;
    struct recorder *const r = (struct recorder *)session;
    if (value->number < r->flags_room && r->alive[value->number] < UINT8_MAX)
        r->alive[value->number]++;
    return 0;
}

void free_object(PyObject *self)
{
    PyTypeObject *const type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void free_value(PyObject *self)
{
    struct value *const value = (struct value *)self;
    struct recorder *const r = (struct recorder *)value->session;
    if (r && value->number < r->flags_room && r->alive[value->number] < UINT8_MAX)
        r->alive[value->number]--;
    Py_CLEAR(value->session);
    free_object(self);
}

/* torch calls it for functions that are given lazy values: function, types, args, kwargs. */
static PyObject *torch_function(PyObject *kind, PyObject *const *args, Py_ssize_t count,
                                PyObject *names)
{
    PyObject *kwargs = count > 3 && args[3] != Py_None ? args[3] : NULL;
    if (count < 3 || names) {
        PyErr_SetString(PyExc_TypeError, "__torch_function__ takes func, types, args, kwargs");
        return NULL;
    }
    const int is_metadata = PySet_Contains(known.metadata, args[0]);
    if (is_metadata)
        return is_metadata < 0 ? NULL : PyObject_CallFunctionObjArgs(
            known.answer, args[0], args[2], kwargs, NULL);
    if (!active)
        return PyObject_CallFunctionObjArgs(known.no_session, args[0], NULL);
    return record_tuple(active, args[0], args[2], kwargs);
}

static PyMemberDef members_of_value[] = {
    {"_session", T_OBJECT, offsetof(struct value, session), READONLY, NULL},
    {"_number", T_INT, offsetof(struct value, number), READONLY, NULL},
    {"_kind", T_INT, offsetof(struct value, kind), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods_of_value[] = {
    {"__torch_function__", (PyCFunction)(void (*)(void))torch_function,
     METH_FASTCALL | METH_KEYWORDS | METH_CLASS, "Record a call of a torch function."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_of_value[] = {
    {Py_tp_init, init_value}, {Py_tp_dealloc, free_value}, {Py_tp_members, members_of_value},
    {Py_tp_methods, methods_of_value}, {Py_tp_richcompare, compare}, {Py_tp_hash, hash_value},
    {Py_mp_subscript, item_of}, {Py_sq_item, row_of}, {Py_nb_add, add_of}, {Py_nb_subtract, sub_of},
    {Py_nb_multiply, mul_of}, {Py_nb_true_divide, truediv_of}, {Py_nb_floor_divide, floordiv_of},
    {Py_nb_remainder, mod_of}, {Py_nb_power, pow_of}, {Py_nb_matrix_multiply, matmul_of},
    {Py_nb_and, and_of}, {Py_nb_or, or_of}, {Py_nb_xor, xor_of}, {Py_nb_lshift, lshift_of},
    {Py_nb_rshift, rshift_of}, {Py_nb_negative, neg_of}, {Py_nb_positive, pos_of},
    {Py_nb_absolute, abs_of}, {Py_nb_invert, invert_of}, {0, NULL},
};
PyType_Spec spec_of_value = {
    "pyg_dynbatch._native.Value", sizeof(struct value), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots_of_value,
};

/* A function of torch as a method of lazy values, and the method of one value. */
struct function {
    PyObject_HEAD
    PyObject *target, *owner; /* the value, or NULL */
};

static PyObject *new_function(PyObject *type, PyObject *target, PyObject *owner)
{
    struct function *made = (struct function *)PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (made) {
        Py_INCREF(target);
        Py_XINCREF(owner);
        made->target = target;
        made->owner = owner;
    }
    return (PyObject *)made;
}

static PyObject *make_function(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *target;
    if (!PyArg_ParseTuple(args, "O", &target))
        return NULL;
    return new_function((PyObject *)type, target, NULL);
}

static PyObject *bind(PyObject *self, PyObject *owner, PyObject *type)
{
    if (!owner) {
        Py_INCREF(self);
        return self;
    }
    return new_function(function_type, ((struct function *)self)->target, owner);
}

static PyObject *call_function(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct function *const f = (struct function *)self;
    if (!active)
        return PyObject_CallFunctionObjArgs(known.no_session, f->target, NULL);
    if (!f->owner)
        return record_tuple(active, f->target, args, kwargs);
    const Py_ssize_t count = PyTuple_Size(args);
    if (!count && !kwargs)
        return record_operator(f->target, f->owner, NULL);
    PyObject *all = PyTuple_New(count + 1), *result;
    if (!all)
        return NULL;
    Py_INCREF(f->owner);
    PyTuple_SetItem(all, 0, f->owner);
    for (Py_ssize_t each = 0; each < count; each++) {
        PyObject *item = PyTuple_GetItem(args, each);
        Py_INCREF(item);
        PyTuple_SetItem(all, each + 1, item);
    }
    result = record_tuple(active, f->target, all, kwargs);
    Py_DECREF(all);
    return result;
}

static void free_function(PyObject *self)
{
    Py_CLEAR(((struct function *)self)->target);
    Py_CLEAR(((struct function *)self)->owner);
    free_object(self);
}

static PyMemberDef members_of_function[] = {
    {"__wrapped__", T_OBJECT, offsetof(struct function, target), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots_of_function[] = {
    {Py_tp_new, make_function}, {Py_tp_call, call_function}, {Py_tp_descr_get, bind},
    {Py_tp_dealloc, free_function}, {Py_tp_members, members_of_function}, {0, NULL},
};
PyType_Spec spec_of_function = {
    "pyg_dynbatch._native.Method", sizeof(struct function), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_METHOD_DESCRIPTOR, slots_of_function,
};
