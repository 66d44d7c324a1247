#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <random>

#include "base/process.h"

namespace dadt {
namespace {

// The description of a segment that its owner sends to the peers.
struct Endpoint {
  char format[8];
  uint64_t nonce;
  uint64_t start;
  uint64_t address;
  uint64_t body_bytes;
  int32_t pid;
  int32_t fd;
};
constexpr char kFormat[8] = {'d', 'a', 'd', 't', 's', 'h', 'm', '1'};

std::string reason(int error) { return std::string(": ") + std::strerror(error); }

void* map(int fd, size_t bytes, bool ready) {
  const int flags = MAP_SHARED | (ready ? MAP_POPULATE : 0);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) {
    throw Error(Code::kComm,
                "cannot map " + std::to_string(bytes) + " bytes of shared memory" + reason(errno));
  }
  madvise(memory, bytes, MADV_DONTFORK);  // forked DataLoader workers do not need this memory
  return memory;
}

}  // namespace

Segment::Segment(size_t body_bytes, bool ready)
    : body_bytes_(body_bytes), pid_(getpid()), owner_(pid_), owner_start_(start_time(pid_)) {
  fd_ = memfd_create("dadt", MFD_CLOEXEC);
  if (fd_ < 0) throw Error(Code::kComm, "cannot make shared memory" + reason(errno));
  try {
    if (ftruncate(fd_, static_cast<off_t>(bytes())) != 0) {
      throw Error(Code::kComm,
                  "cannot make " + std::to_string(bytes()) + " bytes of shared memory" + reason(errno));
    }
    memory_ = map(fd_, bytes(), ready);
  } catch (...) {
    ::close(fd_);
    throw;
  }
  std::random_device random;
  SegmentHead* head = new (memory_) SegmentHead{};
  head->nonce = static_cast<uint64_t>(random()) << 32 | random();
  head->users.store(1);
}

Segment::Segment(const std::string& endpoint, size_t body_bytes, bool ready)
    : body_bytes_(body_bytes), pid_(getpid()) {
  Endpoint from;
  if (endpoint.size() != sizeof from || std::memcmp(endpoint.data(), kFormat, sizeof kFormat) != 0) {
    throw Error(Code::kComm,
                "the endpoint is not of this version's shm executor: run one version of dadt everywhere");
  }
  std::memcpy(&from, endpoint.data(), sizeof from);
  if (from.body_bytes != body_bytes) throw Error(Code::kComm, "ranks were built with different chunk sizes");
  owner_ = from.pid;
  owner_start_ = from.start;
  const std::string path = "/proc/" + std::to_string(from.pid) + "/fd/" + std::to_string(from.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    if (start_time(from.pid) != from.start) {
      throw Error(Code::kPeerLost, "process " + std::to_string(from.pid) + " is gone");
    }
    throw Error(Code::kComm,
                "cannot open the shared memory of process " + std::to_string(from.pid) + reason(error) +
                    "; the ranks of a host need one user and one PID namespace, or --executor gloo");
  }
  uint64_t nonce = 0;
  const bool same = pread(fd, &nonce, sizeof nonce, 0) == sizeof nonce && nonce == from.nonce;
  if (!same) {
    ::close(fd);
    throw Error(Code::kPeerLost, "process " + std::to_string(from.pid) + " no longer has its shared memory");
  }
  if (from.pid == pid_) {
    // If the peer is in the same process, both use one mapping, so that a thread sanitizer sees all accesses.
    ::close(fd);
    memory_ = reinterpret_cast<void*>(from.address);
    head().users.fetch_add(1);
    return;
  }
  try {
    memory_ = map(fd, bytes(), ready);
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);
}

Segment::~Segment() {
  if (getpid() != pid_) return;
  if (fd_ >= 0) ::close(fd_);
  if (owner_ != pid_ || head().users.fetch_sub(1) == 1) munmap(memory_, bytes());
}

std::string Segment::endpoint() const {
  Endpoint to{{}, head().nonce, owner_start_, reinterpret_cast<uint64_t>(memory_), body_bytes_, owner_, fd_};
  std::memcpy(to.format, kFormat, sizeof kFormat);
  return std::string(reinterpret_cast<const char*>(&to), sizeof to);
}

void Segment::seal() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace dadt
