#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace dadt {

// Starts a thread that blocks signals, since Python's main thread handles them. Signals of faults in the
// thread itself, such as SIGSEGV, are not blocked, so that a handler can print its stack. name: at most 15
// characters.
template <typename Body>
std::thread start_thread(const char* name, Body&& body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::forward<Body>(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace dadt
