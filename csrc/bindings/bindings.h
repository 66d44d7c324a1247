// Shared by the parts of the core's Python face.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "engine/work.h"

namespace dadt {

namespace py = pybind11;
using namespace py::literals;

using Addresses = std::vector<uintptr_t>;
using Pieces = std::vector<std::pair<uintptr_t, size_t>>;  // address, bytes

// As py::gil_scoped_release, for threads that may outlive the interpreter, too: what would end such a thread
// in the middle of C++ is to take the GIL then, so it sleeps until the process is gone.
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

  const bool ends_it_;  // this is the thread that finalizes
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

// Errors come from any rank, cut to what had room: what is no UTF-8 in them must not hide them.
inline py::str text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

template <typename Error>
py::object text_of(const std::optional<Error>& error) {
  return error ? py::object(text(error->what())) : py::none();
}

// The other way: a file's name may hold what UTF-8 has not.
inline std::string utf8(const py::str& text) {
  PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace");
  if (encoded == nullptr) throw py::error_already_set();
  return std::string(py::reinterpret_steal<py::bytes>(encoded));
}

// The bytes that a rank has sent, as a buffer of Python's.
struct Received {
  std::shared_ptr<Work> work;
  size_t rank;
};
std::vector<Received> received(const std::shared_ptr<Work>& work);

// Deletes what joins a thread: without the GIL.
struct DeleteUnlocked {
  template <typename Owner>
  void operator()(Owner* owner) const {
    const Unlock unlocked;
    delete owner;
  }
};

// The result of a Work or Ticket that went well; else its error is raised again.
template <typename Handle>
const Result& good(const Handle& handle) {
  const Result& result = handle.result();
  if (result.error) throw *result.error;
  return result;
}

// The `abort(reason, lost=False)` of what has an abort(Error).
template <typename Owner>
void abort_unlocked(Owner& owner, const py::str& reason, bool lost) {
  const Error error(lost ? Code::kPeerLost : Code::kAborted, utf8(reason));
  const Unlock unlocked;
  owner.abort(error);
}

// Waits without the GIL and looks for Ctrl-C every 0.1 s. False if that took longer than `timeout` seconds.
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

// Waits for a Work or Ticket. Throws its error, or one that says that `title` was not done in time.
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
