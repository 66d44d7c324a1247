// Helpers that all parts of the Python bindings share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "engine/work.h"

namespace dadt {

namespace py = pybind11;
using namespace py::literals;

using Addresses = std::vector<uintptr_t>;
using Pieces = std::vector<std::pair<uintptr_t, size_t>>;  // address and number of bytes of each piece

// Like py::gil_scoped_release, but safe for threads that may outlive the interpreter. Taking the GIL during
// finalization would end such a thread in the middle of C++ code, so the thread sleeps until the process
// ends.
class Unlock {
 public:
  Unlock() : ends_it_(is_finalizing()), state_(PyEval_SaveThread()) {}
  ~Unlock() noexcept(false) {
    while (is_finalizing() && !ends_it_) pause();
    PyEval_RestoreThread(state_);
  }
  Unlock(const Unlock&) = delete;
  Unlock& operator=(const Unlock&) = delete;

 private:
  static bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }

  const bool ends_it_;  // whether this thread itself finalizes the interpreter
  PyThreadState* const state_;
};
using Unlocked = py::call_guard<Unlock>;

Operation allreduce_operation(const Layout& layout, const Addresses& inputs, const Addresses& outputs,
                              std::string name, Reduction reduction);
Operation broadcast_operation(const Layout& layout, const Addresses& tensors, int root, std::string name);
Operation exchange_operation(const Pieces& sends, const std::optional<Pieces>& receives, std::string name);

template <typename Pointer>
std::vector<Pointer> pointers(const Addresses& addresses) {
  std::vector<Pointer> result;
  result.reserve(addresses.size());
  for (uintptr_t address : addresses) result.push_back(reinterpret_cast<Pointer>(address));
  return result;
}

// Converts an error message to a Python string. Messages from other ranks may be cut in the middle of a
// character, so invalid UTF-8 is replaced instead of hiding the message behind another error.
inline py::str text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

template <typename Error>
py::object text_of(const std::optional<Error>& error) {
  return error ? py::object(text(error->what())) : py::none();
}

// Converts a Python string to UTF-8. Characters that UTF-8 cannot represent, as in some file names, are
// escaped.
inline std::string utf8(const py::str& text) {
  PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace");
  if (encoded == nullptr) throw py::error_already_set();
  return std::string(py::reinterpret_steal<py::bytes>(encoded));
}

// The bytes that a rank has sent, exposed as a Python buffer.
struct Received {
  std::shared_ptr<Work> work;
  size_t rank;
};
std::vector<Received> received(const std::shared_ptr<Work>& work);

// Deletes an object without holding the GIL, since its destructor joins a thread.
struct DeleteUnlocked {
  template <typename Owner>
  void operator()(Owner* owner) const {
    const Unlock unlocked;
    delete owner;
  }
};

// Returns the result of a Work or Ticket, or throws the error with which it ended.
template <typename Handle>
const Result& good(const Handle& handle) {
  const Result& result = handle.result();
  if (result.error) throw *result.error;
  return result;
}

// Implements the Python method `abort(reason, lost=False)` for classes with a method abort(Error).
template <typename Owner>
void abort_unlocked(Owner& owner, const py::str& reason, bool lost) {
  const Error error(lost ? Code::kPeerLost : Code::kAborted, utf8(reason));
  const Unlock unlocked;
  owner.abort(error);
}

// Waits for a Work, Ticket or Transit without the GIL, and checks for Ctrl-C every 0.1 s. Returns false if it
// is not done within `timeout` seconds.
template <typename Handle>
bool wait_unlocked(Handle& handle, double timeout) {
  const auto deadline = deadline_after(timeout);
  while (true) {
    bool done = false;
    {
      const Unlock unlocked;
      done = handle.wait(std::min(deadline, Clock::now() + std::chrono::milliseconds(100)));
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (Clock::now() >= deadline) return false;
  }
}

// Waits for a Work or Ticket. Throws its error, or a timeout error that names it by `title`.
template <typename Handle>
void wait_for(Handle& handle, double timeout, const std::string& title) {
  if (!wait_unlocked(handle, timeout)) {
    const std::string seconds = py::str(py::float_(timeout));
    throw Error(Code::kTimeout, title + " was not done within " + seconds + " s");
  }
  good(handle);
}

void bind_kernels(py::module_& module);
void bind_mailbox(py::module_& module);
void bind_negotiation(py::module_& module);
void bind_timeline(py::module_& module);

}  // namespace dadt
