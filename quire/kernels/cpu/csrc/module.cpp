// The Python module `_C`. Kernels take tensors and read their addresses here, so that no address outlives its tensor.
//
//   builds()            names of the builds that run on this machine, the fastest first
//   use(name)           use the kernels of that build
//   set_threads(n)      set the number of threads of a team
//   <kernel>(*args)     run a kernel; during a capture, also append the call to the tape
//   record()            start a capture
//   stop()              end the capture; returns the tape, a list of kernel calls
//   play(tape)          replay its calls with one team, on the same addresses: the caller must keep the memory alive
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <vector>

#include "ops.h"
#include "team.h"

namespace quire {
#define BUILD(isa) \
  namespace isa { \
  extern const Build kBuild; \
  }
QUIRE_BUILDS
#undef BUILD

static const Build* const kBuilds[] = {
#define BUILD(isa) &isa::kBuild,
    QUIRE_BUILDS
#undef BUILD
};

struct Tape {
  std::vector<Call> calls;
};

struct State {
  const Build* build = nullptr;
  int num_threads = 1;
  PyObject* data_ptr = nullptr;  // the method's name
};
static State state;  // of the module; protected by the GIL
static thread_local Tape* recording = nullptr;

constexpr const char* kTapeName = "quire.kernels.cpu.tape";

static bool read_arg(PyObject* object, char kind, const char* op, Py_ssize_t place, Arg* arg) {
  if (kind == 'i') {
    arg->integer = PyLong_AsLongLong(object);
  } else if (kind == 'd') {
    arg->number = PyFloat_AsDouble(object);
  } else if (kind == 'o' && object == Py_None) {
    arg->data = nullptr;
    return true;
  } else {
    PyObject* address = PyObject_CallMethodObjArgs(object, state.data_ptr, nullptr);
    if (address == nullptr) {
      PyErr_Clear();
      PyErr_Format(PyExc_TypeError, "%s: argument %zd must be a tensor", op, place);
      return false;
    }
    arg->data = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
  }
  return !PyErr_Occurred();
}

static PyObject* call(PyObject* self, PyObject* const* objects, Py_ssize_t count) {
  const Op& op = state.build->ops[PyLong_AsLong(self)];
  if (count != (Py_ssize_t)strlen(op.kinds))
    return PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", op.name, (Py_ssize_t)strlen(op.kinds), count);
  Call one;
  one.kernel = op.kernel;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!read_arg(objects[i], op.kinds[i], op.name, i, &one.args[i])) return nullptr;
  if (recording != nullptr) recording->calls.push_back(one);
  int num_threads = state.num_threads;
  Py_BEGIN_ALLOW_THREADS
  run(&one, 1, num_threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject* builds(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Build* build : kBuilds)
    if (names != nullptr && build->runs_here()) {
      PyObject* name = PyUnicode_FromString(build->name);
      if (name == nullptr || PyList_Append(names, name) < 0) Py_CLEAR(names);
      Py_XDECREF(name);
    }
  return names;
}

static PyObject* use(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_AsUTF8String(name);
  if (bytes == nullptr) return nullptr;
  const char* wanted = PyBytes_AsString(bytes);
  for (const Build* build : kBuilds)
    if (strcmp(build->name, wanted) == 0 && build->runs_here()) {
      state.build = build;
      Py_DECREF(bytes);
      Py_RETURN_NONE;
    }
  PyErr_Format(PyExc_ValueError, "there is no build %s that runs on this machine", wanted);
  Py_DECREF(bytes);
  return nullptr;
}

static PyObject* set_threads(PyObject*, PyObject* number) {
  long num_threads = PyLong_AsLong(number);
  if (PyErr_Occurred()) return nullptr;
  if (num_threads < 1) {
    PyErr_SetString(PyExc_ValueError, "there must be at least one thread");
    return nullptr;
  }
  state.num_threads = (int)num_threads;
  Py_RETURN_NONE;
}

static PyObject* record(PyObject*, PyObject*) {
  if (recording != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "a tape is being recorded already");
    return nullptr;
  }
  recording = new Tape;
  Py_RETURN_NONE;
}

static void forget(PyObject* capsule) { delete (Tape*)PyCapsule_GetPointer(capsule, kTapeName); }

static PyObject* stop(PyObject*, PyObject*) {
  if (recording == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "no tape is being recorded");
    return nullptr;
  }
  Tape* tape = recording;
  recording = nullptr;
  PyObject* capsule = PyCapsule_New(tape, kTapeName, forget);
  if (capsule == nullptr) delete tape;
  return capsule;
}

static PyObject* play(PyObject*, PyObject* capsule) {
  Tape* tape = (Tape*)PyCapsule_GetPointer(capsule, kTapeName);
  if (tape == nullptr) return nullptr;
  int num_threads = state.num_threads;
  Py_BEGIN_ALLOW_THREADS
  run(tape->calls.data(), tape->calls.size(), num_threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyMethodDef kMethods[] = {
    {"builds", builds, METH_NOARGS, nullptr}, {"use", use, METH_O, nullptr},
    {"set_threads", set_threads, METH_O, nullptr}, {"record", record, METH_NOARGS, nullptr},
    {"stop", stop, METH_NOARGS, nullptr}, {"play", play, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

// All kernels are the same C function, bound to the index of the kernel.
static PyMethodDef kKernelMethods[128];

static bool add_kernels(PyObject* module) {
  for (int i = 0; i < state.build->num_ops; i++) {
    kKernelMethods[i] = {state.build->ops[i].name, (PyCFunction)(void (*)(void))call, METH_FASTCALL, nullptr};
    PyObject* number = PyLong_FromLong(i);
    PyObject* function = number == nullptr ? nullptr : PyCFunction_NewEx(&kKernelMethods[i], number, nullptr);
    Py_XDECREF(number);
    if (function == nullptr) return false;
    int failed = PyModule_AddObjectRef(module, state.build->ops[i].name, function);
    Py_DECREF(function);
    if (failed) return false;
  }
  return true;
}
}  // namespace quire

PyMODINIT_FUNC PyInit__C() {
  using namespace quire;
  for (const Build* build : kBuilds)
    if (state.build == nullptr && build->runs_here()) state.build = build;
  if (state.build == nullptr) {
    PyErr_SetString(PyExc_ImportError, "it has no build that runs on this machine");
    return nullptr;
  }
  state.data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* module = PyModule_Create(&kModule);
  if (module != nullptr && (state.data_ptr == nullptr || !add_kernels(module))) Py_CLEAR(module);
  return module;
}
