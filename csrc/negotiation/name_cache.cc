#include "negotiation/name_cache.h"

#include <utility>

namespace dadt {

std::shared_ptr<const Request> NameCache::find(uint64_t id) const {
  const auto cached = cached_.find(id);
  return cached == cached_.end() ? nullptr : cached->second.request;
}

uint64_t NameCache::id_of(const Request& request) const {
  const auto id = ids_.find(request.name);
  return id != ids_.end() && *cached_.at(id->second).request == request ? id->second : 0;
}

void NameCache::use(uint64_t id) { ages_.splice(ages_.end(), ages_, cached_.at(id).age); }

uint64_t NameCache::admit(std::shared_ptr<const Request> request, Decision& decision) {
  const std::string& name = request->name;
  if (const auto old = ids_.find(name); old != ids_.end()) evict(old->second, decision);
  const uint64_t id = next_id_++;
  ids_[name] = id;
  decision.admitted.push_back({id, name});
  cached_[id] = {std::move(request), ages_.insert(ages_.end(), id)};
  return id;
}

void NameCache::trim(size_t capacity, const std::function<bool(const std::string& name)>& is_pending,
                     Decision& decision) {
  for (auto id = ages_.begin(); cached_.size() > capacity && id != ages_.end();) {
    const uint64_t oldest = *id++;
    if (!is_pending(cached_.at(oldest).request->name)) evict(oldest, decision);
  }
}

void NameCache::evict(uint64_t id, Decision& decision) {
  const auto cached = cached_.find(id);
  ids_.erase(cached->second.request->name);
  ages_.erase(cached->second.age);
  cached_.erase(cached);
  decision.evicted.push_back(id);
}

}  // namespace dadt
