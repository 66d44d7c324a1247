#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <random>

#include "ranks.h"
#include "tcp/tcp.h"
#include "tcp/tcp_mailbox.h"
#include "tcp_pairs.h"

namespace dadt {

// Ranks whose connections are replaced when they break, and can be made to break.
class LastingRanks {
 public:
  LastingRanks(int world_size, int streams) : sockets_(meshes(world_size, streams)) {
    for (int rank = 0; rank < world_size; ++rank) {
      ranks_.push_back(std::make_shared<TcpExecutor>(rank, sockets_[rank], 2));
      mail_.push_back(std::make_unique<TcpMailbox>(ranks_.back()->links()));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      threads_.emplace_back([this, rank] {
        while (const auto other = ranks_[rank]->links()->await_break()) replace(rank, *other);
      });
    }
  }
  ~LastingRanks() {
    is_over_ = true;
    for (const auto& rank : ranks_) rank->close();
    for (std::thread& thread : threads_) thread.join();
  }

  int world_size() const { return static_cast<int>(ranks_.size()); }
  TcpExecutor& operator[](int rank) { return *ranks_[rank]; }
  TcpMailbox& mail(int rank) { return *mail_[rank]; }

  void cut(int rank, int other, size_t which) {
    shutdown(sockets_[rank][other][which % sockets_[rank][other].size()], SHUT_RDWR);
  }

  int replaced() const { return replaced_; }

 private:
  void replace(int rank, int other) {
    const std::lock_guard lock(mutexes_[std::min(rank, other)][std::max(rank, other)]);
    if (!ranks_[rank]->links()->is_detached(other)) return;
    const auto theirs = ranks_[other]->links()->detach(rank);
    const auto mine = ranks_[rank]->links()->detach(other);
    if (!mine || !theirs) return;
    std::vector<int> here, there;
    for (size_t i = 0; i < sockets_[rank][other].size(); ++i) {
      const auto [one, another] = pair();
      here.push_back(one);
      there.push_back(another);
    }
    const auto attach = [this](Links& links, int peer, const std::vector<int>& sockets, Positions received) {
      const bool is_attached = links.attach(peer, sockets, received);
      EXPECT_TRUE(is_attached || is_over_);
      for (int socket : sockets) close(socket);
    };
    std::thread beside([&] { attach(*ranks_[other]->links(), rank, there, *mine); });
    attach(*ranks_[rank]->links(), other, here, *theirs);
    beside.join();
    ++replaced_;
  }

  const std::vector<std::vector<std::vector<int>>> sockets_;
  std::vector<std::shared_ptr<TcpExecutor>> ranks_;
  std::vector<std::unique_ptr<TcpMailbox>> mail_;
  std::vector<std::thread> threads_;
  std::mutex mutexes_[4][4];
  std::atomic<int> replaced_{0};
  std::atomic<bool> is_over_{false};  // ranks that have closed replace nothing
};

// Breaks connections of ranks at any time, until so many were replaced.
class Cutter {
 public:
  Cutter(LastingRanks& ranks, int enough) : thread_([this, &ranks, enough] { run(ranks, enough); }) {}
  ~Cutter() {
    is_over_ = true;
    thread_.join();
  }

 private:
  void run(LastingRanks& ranks, int enough) {
    std::mt19937 random(7);
    const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
    for (int i = 0; !is_over_ && ranks.replaced() < enough; ++i) {
      const int rank = below(ranks.world_size());
      const int other = (rank + 1 + below(ranks.world_size() - 1)) % ranks.world_size();
      const int replaced = ranks.replaced();
      ranks.cut(rank, other, random());
      const auto until = Clock::now() + std::chrono::microseconds(below(20'000));
      while (!is_over_ && (Clock::now() < until || (i % 3 == 0 && ranks.replaced() == replaced))) {
        std::this_thread::yield();
      }
    }
  }

  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

}  // namespace dadt
