/* The kernels of fused Tree-LSTMs as functions for Python, and the choice of their variant.

   Structs that several calls share are passed as bytes, made by `tree_lstm_nodes` and
   `tree_lstm_incoming`. */

#include "arguments.h"
#include "tree_lstm.h"

extern const struct kernels baseline_kernels;
#ifdef X86_VARIANTS
extern const struct kernels avx2_kernels, avx512_kernels;
#endif

static const struct kernels *in_use = &baseline_kernels;

/* The variants that this processor can run, the best one first; returns their number. */
static int supported(const struct kernels **found)
{
    int count = 0;
#ifdef X86_VARIANTS
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        found[count++] = &avx512_kernels;
    if (has_avx2)
        found[count++] = &avx2_kernels;
#endif
    found[count++] = &baseline_kernels;
    return count;
}

void choose_best_kernels(void)
{
    const struct kernels *found[3];
    supported(found);
    in_use = found[0];
}

static PyObject *variants(PyObject *module, PyObject *none)
{
    const struct kernels *found[3];
    const int count = supported(found);
    PyObject *names = PyList_New(0);
    for (int each = 0; names && each < count; each++) {
        PyObject *name = PyUnicode_FromString(found[each]->name);
        if (!name || PyList_Append(names, name))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *variant(PyObject *module, PyObject *none)
{
    return PyUnicode_FromString(in_use->name);
}

static PyObject *use_variant(PyObject *module, PyObject *name)
{
    const struct kernels *found[3];
    const int count = supported(found);
    for (int each = 0; each < count; each++)
        if (!PyUnicode_CompareWithASCIIString(name, found[each]->name)) {
            in_use = found[each];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "%R is none of the variants() of this processor", name);
}

static const struct field nodes_fields[] = {
    FIELD(nodes, width),       FIELD(nodes, arity),        FIELD(nodes, half),
    FIELD(nodes, hidden),      FIELD(nodes, memory),       FIELD(nodes, activated),
    FIELD(nodes, half_hidden), FIELD(nodes, dropout_mask), FIELD(nodes, bias),
    FIELD(nodes, forget_bias), FIELD(nodes, index),        FIELD(nodes, starts),
    FIELD(nodes, all_hidden),  FIELD(nodes, all_memory),   FIELD(nodes, gathered),
    FIELD(nodes, sums),
};

static const struct field incoming_fields[] = {
    FIELD(incoming, half),           FIELD(incoming, hidden),
    FIELD(incoming, memory),         FIELD(incoming, place),
    FIELD(incoming, outside_hidden), FIELD(incoming, outside_hidden_row),
    FIELD(incoming, outside_memory), FIELD(incoming, outside_memory_row),
};

static const struct field run_fields[] = {
    FIELD(run, width),          FIELD(run, arity),         FIELD(run, leaves),
    FIELD(run, levels),         FIELD(run, inner),         FIELD(run, slots),
    FIELD(run, cells),          FIELD(run, inputs),        FIELD(run, threads),
    FIELD(run, sizes),          FIELD(run, filled),        FIELD(run, index),
    FIELD(run, starts),         FIELD(run, leaf_of),       FIELD(run, weight_hidden),
    FIELD(run, dropout_mask),   FIELD(run, memory),        FIELD(run, activated),
    FIELD(run, leaf_activated), FIELD(run, gathered),      FIELD(run, sums),
    FIELD(run, packed_hidden),  FIELD(run, packed_forget), FIELD(run, leaf_gates),
    FIELD(run, gates),          FIELD(run, forget),        FIELD(run, keeps),
    FIELD(run, hidden),         FIELD(run, rows),          FIELD(run, weight_input),
    FIELD(run, bias),           FIELD(run, own),           FIELD(run, all_bias),
    FIELD(run, products),       FIELD(run, features),      FIELD(run, leaf_hidden),
    FIELD(run, leaf_memory),    FIELD(run, packed_input),  FIELD(run, given),
    FIELD(run, of_cells),       FIELD(run, leaf_grads),    FIELD(run, grads),
    FIELD(run, to_forget),      FIELD(run, to_hidden),     FIELD(run, to_memory),
    FIELD(run, to_sums),
};

/* A function that returns a struct, filled from keyword arguments, as bytes. */
#define MAKER(type)                                                                                \
    static PyObject *make_##type(PyObject *module, PyObject *const *args, Py_ssize_t count,        \
                                 PyObject *names)                                                  \
    {                                                                                              \
        struct type made;                                                                          \
        if (read_fields(type##_fields, COUNT(type##_fields), args, count, names, &made))           \
            return NULL;                                                                           \
        return PyBytes_FromStringAndSize((const char *)&made, sizeof made);                        \
    }
MAKER(nodes)
MAKER(incoming)

/* Reads the numbers and addresses of a call, and runs `call` without the interpreter's lock. */
#define CALL(name, wanted, call)                                                                   \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t count)               \
    {                                                                                              \
        int64_t a[wanted];                                                                         \
        if (read_arguments(args, count, wanted, a))                                                \
            return NULL;                                                                           \
        PyThreadState *state = PyEval_SaveThread();                                                \
        call;                                                                                      \
        PyEval_RestoreThread(state);                                                               \
        Py_RETURN_NONE;                                                                            \
    }

#define BLOCK_AT(place) ((struct block){a[place], a[place + 1], a[place + 2], a[place + 3]})
#define POINTER(type, place) ((type *)(intptr_t)a[place])
#define GATES_AT(place) ((struct gates){POINTER(void, place), POINTER(void, place + 1)})

CALL(gather, 6, in_use->gather(POINTER(struct nodes, 0), BLOCK_AT(1), (int)a[5]))
CALL(forward, 12,
     in_use->forward(POINTER(struct nodes, 0), BLOCK_AT(1), GATES_AT(5), GATES_AT(7),
                     POINTER(void, 9), a[10], (int)a[11]))
CALL(backward, 12,
     in_use->backward(POINTER(struct nodes, 0), POINTER(struct incoming, 1), BLOCK_AT(2),
                      GATES_AT(6), GATES_AT(8), POINTER(float, 10), (int)a[11]))
CALL(sum_equal, 7,
     in_use->sum_equal(POINTER(struct incoming, 0), POINTER(int64_t, 1), a[2], a[3],
                       POINTER(float, 4), POINTER(float, 5), (int)a[6]))

static PyObject *order_relu(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    int64_t a[7];
    if (read_arguments(args, count, 7, a))
        return NULL;
    const int32_t *ends = POINTER(int32_t, 3);
    for (int64_t each = 0; each < 2 * a[4]; each++)
        if (ends[each] < 0 || ends[each] >= a[1])
            return PyErr_Format(PyExc_IndexError, "atom %d is not in 0 to %lld", (int)ends[each],
                                (long long)a[1] - 1);
    PyThreadState *state = PyEval_SaveThread();
    in_use->order_relu(POINTER(float, 0), a[2], ends, ends + a[4], a[4], POINTER(float, 5),
                       (int)a[6]);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

static PyObject *histogram(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    int64_t a[9];
    if (read_arguments(args, count, 9, a))
        return NULL;
    const int64_t *set = POINTER(int64_t, 1);
    for (int64_t row = 0; row < a[2]; row++)
        if (set[row] < 0 || set[row] >= a[6])
            return PyErr_Format(PyExc_IndexError, "set %lld is not in 0 to %lld",
                                (long long)set[row], (long long)a[6] - 1);
    PyThreadState *state = PyEval_SaveThread();
    in_use->histogram(POINTER(float, 0), set, a[2], a[3], POINTER(float, 4), POINTER(float, 5),
                      POINTER(float, 7), (int)a[8]);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

static const struct field fields_of_pair_layers[] = {
    FIELD(pair_layers, atoms), FIELD(pair_layers, width),   FIELD(pair_layers, pairs),
    FIELD(pair_layers, codes), FIELD(pair_layers, threads), FIELD(pair_layers, middle),
    FIELD(pair_layers, inner), FIELD(pair_layers, padded),  FIELD(pair_layers, begins),
    FIELD(pair_layers, code),  FIELD(pair_layers, starts),  FIELD(pair_layers, parts),
    FIELD(pair_layers, own),   FIELD(pair_layers, weight),  FIELD(pair_layers, next),
    FIELD(pair_layers, bias),  FIELD(pair_layers, sums),
};

static int64_t pair_layers(struct pair_layers *p)
{
    for (int64_t each = 0; each < 2 * p->pairs; each++)
        if (p->begins[each] < 0 || p->begins[each] >= p->atoms)
            return INVALID;
    for (int64_t pair = 0; p->code && pair < p->pairs; pair++)
        if (p->code[pair] < 0 || p->code[pair] >= p->codes)
            return INVALID;
    in_use->pair_layers(p);
    return 0;
}

FUNCTION(pair_layers)

/* Whole runs take the fields of `struct run` by name. */
#define RUN(function)                                                                              \
    static PyObject *function(PyObject *module, PyObject *const *args, Py_ssize_t count,           \
                              PyObject *names)                                                     \
    {                                                                                              \
        struct run run;                                                                            \
        if (read_fields(run_fields, COUNT(run_fields), args, count, names, &run))                  \
            return NULL;                                                                           \
        PyThreadState *state = PyEval_SaveThread();                                                \
        in_use->function(&run);                                                                    \
        PyEval_RestoreThread(state);                                                               \
        Py_RETURN_NONE;                                                                            \
    }
RUN(forward_run)
RUN(backward_run)

#define KEYWORDS(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS
#define POSITIONS(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

PyMethodDef tree_lstm_functions[] = {
    {"variants", variants, METH_NOARGS, "List the variants that this processor can run."},
    {"variant", variant, METH_NOARGS, "Return the variant in use."},
    {"use_variant", use_variant, METH_O, "Use one of the variants, such as \"baseline\"."},
    {"tree_lstm_nodes", KEYWORDS(make_nodes), "Make a `struct nodes` of tree_lstm.h."},
    {"tree_lstm_incoming", KEYWORDS(make_incoming), "Make a `struct incoming`."},
    {"tree_lstm_gather", POSITIONS(gather), "nodes, *block, threads"},
    {"tree_lstm_forward", POSITIONS(forward),
     "nodes, *block, products, their forget, gates, forget, own, filled, threads"},
    {"tree_lstm_backward", POSITIONS(backward),
     "nodes, incoming, *block, gates, forget, grads, to_forget, to_memory, threads"},
    {"tree_lstm_sum_equal", POSITIONS(sum_equal),
     "incoming, cell, leaves, width, hidden, memory, threads"},
    {"tree_lstm_forward_run", KEYWORDS(forward_run), "Run a whole schedule."},
    {"tree_lstm_backward_run", KEYWORDS(backward_run), "And back."},
    {"order_relu", POSITIONS(order_relu), "parts, atoms, width, ends, pairs, out, threads"},
    METHOD(pair_layers, "What a weave module adds up of updated pairs; -2 if they do not fit."),
    {"histogram", POSITIONS(histogram), "x, set, rows, width, mean, sharpness, sets, out, threads"},
    {NULL, NULL, 0, NULL},
};
