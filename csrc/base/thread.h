#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace dadt {

// Starts a thread that receives no signals, since signals belong to Python's main thread. The exceptions are
// faults of the thread itself, for which a handler prints where it was. name: at most 15 characters.
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
