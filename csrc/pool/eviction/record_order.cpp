#include "pool/eviction/record_order.h"

#include <algorithm>
#include <stdexcept>

#include "base/check.h"
#include "pool/eviction/eviction_policies.h"

namespace kvpage {
namespace {

constexpr double kNanosPerSecond = 1e9;

int64_t nanos(const char* name, double seconds) {
  check(seconds >= 0 && seconds < RecordOrder::kForever, name, " must be between 0 and ", RecordOrder::kForever,
        ", got ", seconds);
  return static_cast<int64_t>(seconds * kNanosPerSecond);
}

void require(bool ok, const char* message) {
  if (!ok) throw std::runtime_error(message);
}

}  // namespace

RecordOrder::RecordOrder(std::string_view policy)
    : name_(policy),
      policy_(make_eviction_policy(policy, "policy", EvictionCosts::equal())),
      heeds_time_(policy_->heeds_time()) {
  clock_.keep_time(heeds_time_);
}

RecordOrder::Record& RecordOrder::at(int64_t place) {
  const bool is_known = place >= 0 && place < static_cast<int64_t>(records_.size());
  check(is_known && records_[static_cast<size_t>(place)].is_live, "place must be that of a record, got ", place);
  return records_[static_cast<size_t>(place)];
}

int64_t RecordOrder::tick() noexcept {
  clock_.begin_use();
  return static_cast<int64_t>(clock_.tick());
}

int64_t RecordOrder::add(double age) {
  const int64_t nanoseconds = nanos("age", age);
  if (free_.empty()) {
    if (free_.capacity() <= records_.size()) free_.reserve(2 * records_.size() + 16);
    records_.emplace_back();
    records_.back().place = static_cast<int64_t>(records_.size()) - 1;
    free_.push_back(records_.back().place);
  }
  const int64_t place = free_.back();
  free_.pop_back();
  Record& record = records_[static_cast<size_t>(place)];
  record.is_live = true;
  record.used_at = record.added_at = tick() - (heeds_time_ ? nanoseconds : 0);
  list(&record);
  return place;
}

void RecordOrder::use(int64_t place) {
  Record& record = at(place);
  unlist(&record);
  policy_->reused(record.facts(), 1, now());
  record.used_at = tick();
  ++record.num_hits;
  list(&record);
}

void RecordOrder::remove(int64_t place, bool is_evicted) {
  Record& record = at(place);
  if (is_evicted) policy_->forgotten(record.facts(), 1, now());
  unlist(&record);
  record = Record();
  record.place = place;
  free_.push_back(place);
}

RecordWalk RecordOrder::walk() const { return RecordWalk(*this); }

void RecordOrder::set_time(double seconds) { clock_.set_time(nanos("seconds", seconds)); }

void RecordOrder::list(Record* record) noexcept {
  const EvictionFacts facts = record->facts();
  record->rank_class = static_cast<uint8_t>(policy_->class_of(facts));
  record->rank_key = policy_->key_of(facts);
  policy_->listed(record->facts(), 1);
  ranks_.insert(record);
  ++num_changes_;
}

void RecordOrder::unlist(Record* record) noexcept {
  ranks_.erase(record);
  policy_->listed(record->facts(), -1);
  ++num_changes_;
}

void RecordOrder::check_invariants() const {
  std::vector<bool> is_free(records_.size());
  for (const int64_t place : free_) {
    require(!is_free[static_cast<size_t>(place)], "a place is free twice");
    is_free[static_cast<size_t>(place)] = true;
  }
  for (size_t place = 0; place < records_.size(); ++place) {
    require(records_[place].place == static_cast<int64_t>(place), "a record does not know its place");
    require(records_[place].is_live != is_free[place], "a place without a record is not free");
  }
  require(free_.capacity() >= records_.size(), "a place could not become free");
  std::vector<bool> is_walked(records_.size());
  for (const int64_t place : walk().take(size() + 1)) {
    require(!is_free[static_cast<size_t>(place)] && !is_walked[static_cast<size_t>(place)], "a place is walked twice");
    is_walked[static_cast<size_t>(place)] = true;
  }
  require(std::count(is_walked.begin(), is_walked.end(), true) == size(), "a record is not in the order");
}

RecordWalk::RecordWalk(const RecordOrder& order)
    : order_(order), num_changes_(order.num_changes_), walk_(order.ranks_, *order.policy_, order.now()) {}

std::vector<int64_t> RecordWalk::take(int64_t count) {
  check(count >= 0, "count must not be negative, got ", count);
  check(num_changes_ == order_.num_changes_, "an order must not change while it is walked over");
  std::vector<int64_t> places;
  places.reserve(static_cast<size_t>(std::min(count, order_.size())));
  while (static_cast<int64_t>(places.size()) < count) {
    const auto* record = walk_.next();
    if (!record) break;
    places.push_back(record->place);
  }
  return places;
}

}  // namespace kvpage
