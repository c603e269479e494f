/* Mapped files that become shorter, or whose disk fails, while they are read.
 *
 * An access to a page that cannot be read any more ends the process by SIGBUS, and no check beforehand
 * helps: another process may truncate the file between the check and the access. So ranges of memory
 * are guarded: a handler of SIGBUS puts zeros in the place of what is gone, and notes that the range is
 * lost; whoever has read from it asks for that afterwards. What is not guarded is passed on to the
 * handler that was there before, and ours is only there while something is guarded.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A guarded range; free if it has no bytes. Handlers may look at it at any time, so it is never given
 * back, only used again. All other access is under the GIL. */
typedef struct Guard {
    atomic_uintptr_t begin, end;
    atomic_int lost;
    struct Guard *next, *next_free;
} Guard;

static _Atomic(Guard *) guards;
static Guard *free_guards;
static Py_ssize_t active;
static uintptr_t page_size;
static struct sigaction previous;

static void on_bus_error(int number, siginfo_t *info, void *context);

static int is_ours(const struct sigaction *action) {
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_bus_error;
}

/* What the process would have done without us. Only once: a handler may restore ours and raise the
 * signal again, as that of faulthandler. */
static void pass_on(int number, siginfo_t *info, void *context) {
    struct sigaction before = previous;
    memset(&previous, 0, sizeof previous);
    previous.sa_handler = SIG_DFL;
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_IGN && info->si_code <= 0) {
        previous = before;
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        sigaction(number, &previous, NULL); /* the access is repeated, and ends the process */
        if (info->si_code <= 0) raise(number);
    } else {
        before.sa_handler(number);
    }
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    int saved = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (Guard *guard = info->si_code > 0 ? atomic_load(&guards) : NULL; guard; guard = guard->next) {
        uintptr_t begin = atomic_load(&guard->begin), end = atomic_load(&guard->end);
        if (at < begin || at >= end) continue;
        /* The end may be of another range: a thread has just taken the guard for one. */
        if (begin != atomic_load(&guard->begin)) continue;
        at -= at % page_size;
        /* First, so that nobody reads zeros without being told. */
        atomic_store(&guard->lost, 1);
        if (mmap((void *)at, end - at, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
                 -1, 0) == MAP_FAILED)
            break;
        errno = saved;
        return;
    }
    pass_on(number, info, context);
    errno = saved;
}

static int install(void) {
    struct sigaction ours, now;
    if (sigaction(SIGBUS, NULL, &now) != 0) return -1;
    if (is_ours(&now)) return 0;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    previous = now;
    return sigaction(SIGBUS, &ours, NULL);
}

/* Whoever has installed another handler since may call ours as the one before: it stays then. */
static void uninstall(void) {
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) == 0 && is_ours(&now)) sigaction(SIGBUS, &previous, NULL);
}

/* guard(address, nbytes): see _native.pyi. */
PyObject *torchstore_guard(PyObject *self, PyObject *args) {
    unsigned long long address, nbytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "KK", &address, &nbytes)) return NULL;
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (nbytes == 0 || address % page_size != 0) {
        PyErr_SetString(PyExc_ValueError, "a guarded range begins with a page, and is not empty");
        return NULL;
    }
    if (install() != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Guard *guard = free_guards;
    int made = guard == NULL;
    if (made && (guard = PyMem_RawCalloc(1, sizeof *guard)) == NULL) return PyErr_NoMemory();
    PyObject *found = PyLong_FromVoidPtr(guard);
    if (found == NULL) {
        if (made) PyMem_RawFree(guard);
        return NULL;
    }
    if (!made) free_guards = guard->next_free;
    atomic_store(&guard->lost, 0);
    atomic_store(&guard->begin, (uintptr_t)address);
    atomic_store(&guard->end, (uintptr_t)(address + (nbytes + page_size - 1) / page_size * page_size));
    if (made) {
        guard->next = atomic_load(&guards);
        atomic_store(&guards, guard);
    }
    active++;
    return found;
}

/* is_lost(guard): see _native.pyi. */
PyObject *torchstore_is_lost(PyObject *self, PyObject *number) {
    (void)self;
    Guard *guard = PyLong_AsVoidPtr(number);
    if (guard == NULL && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(atomic_load(&guard->lost));
}

/* unguard(guard, owner): see _native.pyi. */
PyObject *torchstore_unguard(PyObject *self, PyObject *args) {
    PyObject *number, *owner = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O|O", &number, &owner)) return NULL;
    Guard *guard = PyLong_AsVoidPtr(number);
    if (guard == NULL && PyErr_Occurred()) return NULL;
    atomic_store(&guard->end, 0);
    guard->next_free = free_guards;
    free_guards = guard;
    if (--active == 0) uninstall();
    Py_RETURN_NONE;
}
