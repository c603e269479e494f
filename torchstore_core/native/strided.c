/* Copies a strided array into another, element by element or in short rows: transposed, permuted,
 * with gaps. Longer rows are copied by copy_rows. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_DIMS 64
/* A transposed block with at most so many rows is copied as it is: kernels of 3 × 3, say. */
#define FEW 16

typedef struct {
    size_t extent;
    ptrdiff_t to, of; /* bytes from one index to the next, in the destination and in the source */
} Dim;

typedef struct {
    uint64_t low, high;
} Wide;

typedef struct {
    size_t itemsize, side;
    void (*items)(char *, const char *, Dim);
    void (*block)(char *, const char *, Dim, Dim);
} Kind;

/* items: one element after the other. block: at most ``side`` times as many, by way of memory of its own, so
 * that source and destination are each read and written several lines at a time: ``across`` is contiguous in
 * the destination, ``down`` in the source. */
#define DEFINE_COPIES(type, name, side)                                                            \
    static void items_##name(char *dst, const char *src, Dim dim) {                                \
        for (size_t i = 0; i < dim.extent; i++, dst += dim.to, src += dim.of) {                    \
            type item;                                                                             \
            memcpy(&item, src, sizeof item);                                                       \
            memcpy(dst, &item, sizeof item);                                                       \
        }                                                                                          \
    }                                                                                              \
    static void block_##name(char *dst, const char *src, Dim down, Dim across) {                   \
        if (across.extent <= FEW) { /* few sources, each read on and on */                         \
            for (size_t k = 0; k < down.extent; k++, dst += down.to, src += sizeof(type))          \
                for (size_t i = 0; i < across.extent; i++)                                         \
                    memcpy(dst + i * sizeof(type), src + (ptrdiff_t)i * across.of, sizeof(type));  \
            return;                                                                                \
        }                                                                                          \
        type block[side][side + 16 / sizeof(type)]; /* rows in different sets of the cache */      \
        for (size_t i = 0; i < across.extent; i++) {                                               \
            const char *of = src + (ptrdiff_t)i * across.of;                                       \
            for (size_t k = 0; k < down.extent; k++)                                               \
                memcpy(&block[k][i], of + k * sizeof(type), sizeof(type));                         \
        }                                                                                          \
        for (size_t k = 0; k < down.extent; k++)                                                   \
            memcpy(dst + (ptrdiff_t)k * down.to, block[k], across.extent * sizeof(type));          \
    }                                                                                              \
    static const Kind kind_##name = {sizeof(type), side, items_##name, block_##name};

DEFINE_COPIES(uint8_t, 1, 32)
DEFINE_COPIES(uint16_t, 2, 32)
DEFINE_COPIES(uint32_t, 4, 64)
DEFINE_COPIES(uint64_t, 8, 64)
DEFINE_COPIES(Wide, 16, 32)

static const Kind *const kinds[] = {&kind_1, &kind_2, &kind_4, &kind_8, &kind_16};

static const Kind *kind_of(int64_t itemsize) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if ((int64_t)kinds[i]->itemsize == itemsize) return kinds[i];
    return NULL;
}

typedef struct {
    const Kind *kind;
    size_t run; /* contiguous bytes in both, more than an element of any kind; 0: none */
    int count;
    Dim dims[MOST_DIMS];
} Plan;

static void copy_transposed(const Kind *kind, char *dst, const char *src, Dim down, Dim across) {
    for (size_t i = 0; i < across.extent; i += kind->side) {
        Dim some = {across.extent - i, across.to, across.of};
        if (some.extent > kind->side) some.extent = kind->side;
        char *to = dst + (ptrdiff_t)i * across.to;
        const char *of = src + (ptrdiff_t)i * across.of;
        for (size_t k = 0; k < down.extent; k += kind->side) {
            Dim few = {down.extent - k, down.to, down.of};
            if (few.extent > kind->side) few.extent = kind->side;
            kind->block(to + (ptrdiff_t)k * down.to, of + (ptrdiff_t)k * down.of, few, some);
        }
    }
}

/* Repeat an element, twice as many each time. */
static void fill(char *dst, const char *src, size_t itemsize, size_t nbytes) {
    memcpy(dst, src, itemsize);
    for (size_t done = itemsize; done < nbytes;) {
        size_t more = done < nbytes - done ? done : nbytes - done;
        if (more > 4096) more = 4096 / itemsize * itemsize;
        memcpy(dst + done, dst, more);
        done += more;
    }
}

static void copy_dims(const Plan *plan, int at, char *dst, const char *src) {
    Dim dim = plan->dims[at];
    ptrdiff_t itemsize = (ptrdiff_t)plan->kind->itemsize;
    int left = plan->count - at;
    if (left == 2 && plan->run == 0 && dim.of == itemsize && plan->dims[at + 1].to == itemsize &&
        plan->dims[at + 1].of != 0) {
        copy_transposed(plan->kind, dst, src, dim, plan->dims[at + 1]);
    } else if (left > 1) {
        for (size_t i = 0; i < dim.extent; i++, dst += dim.to, src += dim.of)
            copy_dims(plan, at + 1, dst, src);
    } else if (plan->run) {
        for (size_t i = 0; i < dim.extent; i++, dst += dim.to, src += dim.of)
            memcpy(dst, src, plan->run);
    } else if (dim.of == 0 && dim.to == itemsize) {
        fill(dst, src, plan->kind->itemsize, dim.extent * plan->kind->itemsize);
    } else {
        plan->kind->items(dst, src, dim);
    }
}

/* Order the dimensions for the copy, and join those that are one in both arrays. */
static void arrange(Plan *plan) {
    Dim *dims = plan->dims;
    int count = 0;
    for (int i = 0; i < plan->count; i++)
        if (dims[i].extent != 1) dims[count++] = dims[i];
    for (int i = 1; i < count; i++) /* by steps in the destination, the longest one first */
        for (int k = i; k > 0 && dims[k - 1].to < dims[k].to; k--) {
            Dim swap = dims[k];
            dims[k] = dims[k - 1];
            dims[k - 1] = swap;
        }
    int last = 0;
    for (int i = 1; i < count; i++) {
        ptrdiff_t extent = (ptrdiff_t)dims[i].extent;
        if (dims[last].to == extent * dims[i].to && dims[last].of == extent * dims[i].of) {
            dims[i].extent *= dims[last].extent;
            dims[last] = dims[i];
        } else {
            dims[++last] = dims[i];
        }
    }
    count = count ? last + 1 : 0;
    ptrdiff_t itemsize = (ptrdiff_t)plan->kind->itemsize;
    if (count && dims[count - 1].to == itemsize && dims[count - 1].of == itemsize) {
        plan->run = dims[--count].extent * plan->kind->itemsize;
        const Kind *wider = kind_of((int64_t)plan->run);
        if (wider != NULL) { /* a run of this length is one element of another kind */
            plan->kind = wider;
            plan->run = 0;
        }
    }
    if (plan->run == 0 && count > 2) /* what is contiguous in the source goes next to the last one */
        for (int i = 0; i < count - 2; i++)
            if (dims[i].of == itemsize) {
                Dim found = dims[i];
                memmove(dims + i, dims + i + 1, sizeof(Dim) * (size_t)(count - 2 - i));
                dims[count - 2] = found;
                break;
            }
    if (count == 0) dims[count++] = (Dim){1, 0, 0};
    plan->count = count;
}

/* copy_strided(array): an int64 buffer of dst, src, itemsize, and (extent, dst step, src step) for
 * each dimension. */
PyObject *torchstore_copy_strided(PyObject *self, PyObject *buffer) {
    Py_buffer view;
    (void)self;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0) return NULL;
    Py_ssize_t numbers = view.len / (Py_ssize_t)sizeof(int64_t);
    const int64_t *given = (const int64_t *)view.buf;
    Plan plan = {.kind = numbers < 3 ? NULL : kind_of(given[2])};
    if (plan.kind == NULL || numbers % 3 != 0 || numbers / 3 - 1 > MOST_DIMS) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "copy_strided: no such itemsize, or not three numbers for each of at most 64 dimensions");
        return NULL;
    }
    char *dst = (char *)(uintptr_t)given[0];
    const char *src = (const char *)(uintptr_t)given[1];
    int empty = 0;
    plan.count = (int)(numbers / 3 - 1);
    for (int i = 0; i < plan.count; i++) {
        const int64_t *dim = given + 3 * (i + 1);
        plan.dims[i] = (Dim){(size_t)dim[0], (ptrdiff_t)dim[1], (ptrdiff_t)dim[2]};
        empty |= dim[0] <= 0;
    }
    PyBuffer_Release(&view);
    if (!empty) {
        Py_BEGIN_ALLOW_THREADS
        arrange(&plan);
        copy_dims(&plan, 0, dst, src);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
