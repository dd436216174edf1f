/* The values of models while they are recorded, and the methods of tensors that they have.

   A value is its number and its row type: the first two values of one example, both of row type 5,
   are {session, 0, 5} and {session, 2, 5} if the record of the first takes two integers. */

#include "recorder.h"

/* The numbers of operators in `known.operators`: each with its reflection, and others. */
enum { ADD, SUB, MUL, TRUEDIV, FLOORDIV, MOD, POW, MATMUL, AND, OR, XOR, LSHIFT, RSHIFT };
enum { LT = 2 * (RSHIFT + 1), LE, EQ, NE, GT, GE, NEG, POS, ABS, INVERT, GETITEM };

static PyObject *operator_of(int number, PyObject *left, PyObject *right)
{
    PyObject *target = PyTuple_GetItem(known.operators, number);
    if (!target)
        return NULL;
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
    PyObject *index = PyLong_FromSsize_t(number);
    PyObject *row = index ? item_of(value, index) : NULL;
    Py_XDECREF(index);
    return row;
}

static PyObject *compare(PyObject *value, PyObject *other, int how)
{
    const int numbers[] = {LT, LE, EQ, NE, GT, GE}; /* in the order of Py_LT, Py_LE, ... */
    if (other == Py_None && (how == Py_EQ || how == Py_NE))
        return not_recorded();
    return operator_of(numbers[how], value, other);
}

/* The session no longer has this object for a value. */
static void drop_session(struct value *value)
{
    if (value->session)
        count_alive((struct recorder *)value->session, value->number, -1);
    Py_CLEAR(value->session);
}

static Py_hash_t hash_value(PyObject *value)
{
    return (Py_hash_t)((uintptr_t)value >> 4);
}

static int init_value(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct value *const value = (struct value *)self;
    PyObject *session;
    int32_t number, kind;
    if (!PyArg_ParseTuple(args, "O!ii", recorder_type, &session, &number, &kind))
        return -1;
    if (!are_values((struct recorder *)session, &number, 1))
        return -1;
    drop_session(value);
    value->session = Py_NewRef(session);
    value->number = number;
    value->kind = kind;
    count_alive((struct recorder *)session, number, 1);
    return 0;
}

static int traverse_value(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((struct value *)self)->session);
    return 0;
}

static int clear_value(PyObject *self)
{
    drop_session((struct value *)self);
    return 0;
}

static void free_value(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_value(self);
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
    if (is_metadata < 0)
        return NULL;
    if (is_metadata)
        return PyObject_CallFunctionObjArgs(known.answer, args[0], args[2], kwargs, NULL);
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
    {Py_tp_init, init_value},
    {Py_tp_traverse, traverse_value},
    {Py_tp_clear, clear_value},
    {Py_tp_dealloc, free_value},
    {Py_tp_members, members_of_value},
    {Py_tp_methods, methods_of_value},
    {Py_tp_richcompare, compare},
    {Py_tp_hash, hash_value},
    {Py_mp_subscript, item_of},
    {Py_sq_item, row_of},
    {Py_nb_add, add_of},
    {Py_nb_subtract, sub_of},
    {Py_nb_multiply, mul_of},
    {Py_nb_true_divide, truediv_of},
    {Py_nb_floor_divide, floordiv_of},
    {Py_nb_remainder, mod_of},
    {Py_nb_power, pow_of},
    {Py_nb_matrix_multiply, matmul_of},
    {Py_nb_and, and_of},
    {Py_nb_or, or_of},
    {Py_nb_xor, xor_of},
    {Py_nb_lshift, lshift_of},
    {Py_nb_rshift, rshift_of},
    {Py_nb_negative, neg_of},
    {Py_nb_positive, pos_of},
    {Py_nb_absolute, abs_of},
    {Py_nb_invert, invert_of},
    {0, NULL},
};
PyType_Spec spec_of_value = {
    .name = "pyg_dynbatch._native.Value",
    .basicsize = sizeof(struct value),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots_of_value,
};

/* A function of torch as a method of lazy values, and the method of one value. */
struct function {
    PyObject_HEAD
    PyObject *target, *owner; /* the value, or NULL */
};

static PyObject *new_function(PyTypeObject *type, PyObject *target, PyObject *owner)
{
    struct function *const f = (struct function *)PyType_GenericAlloc(type, 0);
    if (!f)
        return NULL;
    f->target = Py_NewRef(target);
    f->owner = Py_XNewRef(owner);
    return (PyObject *)f;
}

static PyObject *make_function(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *target;
    if (!PyArg_ParseTuple(args, "O", &target))
        return NULL;
    return new_function(type, target, NULL);
}

static PyObject *bind(PyObject *self, PyObject *owner, PyObject *type)
{
    PyTypeObject *const function = (PyTypeObject *)function_type;
    return owner ? new_function(function, ((struct function *)self)->target, owner)
                 : Py_NewRef(self);
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
    PyObject *all = PyTuple_New(count + 1);
    int failed = !all || PyTuple_SetItem(all, 0, Py_NewRef(f->owner));
    for (Py_ssize_t each = 0; !failed && each < count; each++)
        failed = PyTuple_SetItem(all, each + 1, Py_NewRef(PyTuple_GetItem(args, each)));
    PyObject *result = failed ? NULL : record_tuple(active, f->target, all, kwargs);
    Py_XDECREF(all);
    return result;
}

static int traverse_function(PyObject *self, visitproc visit, void *arg)
{
    struct function *const f = (struct function *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(f->target);
    Py_VISIT(f->owner);
    return 0;
}

static int clear_function(PyObject *self)
{
    struct function *const f = (struct function *)self;
    Py_CLEAR(f->target);
    Py_CLEAR(f->owner);
    return 0;
}

static void free_function(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_function(self);
    free_object(self);
}

static PyMemberDef members_of_function[] = {
    {"__wrapped__", T_OBJECT, offsetof(struct function, target), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots_of_function[] = {
    {Py_tp_new, make_function},
    {Py_tp_call, call_function},
    {Py_tp_descr_get, bind},
    {Py_tp_traverse, traverse_function},
    {Py_tp_clear, clear_function},
    {Py_tp_dealloc, free_function},
    {Py_tp_members, members_of_function},
    {0, NULL},
};
PyType_Spec spec_of_function = {
    .name = "pyg_dynbatch._native.Method",
    .basicsize = sizeof(struct function),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_GC,
    .slots = slots_of_function,
};
