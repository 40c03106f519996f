// What the parts of the simulated accelerator share: streams, moments in them, and counters.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 8;

// A place in a stream, which its thread comes to at some time.
class Moment {
 public:
  void reach();
  void wait() const;  // in C++; see wait_on_host
  bool is_past() const;
  int64_t nanoseconds() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool past_ = false;
  int64_t at_ = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

using Task = std::function<void()>;

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream pooled_stream(c10::DeviceIndex device, bool high_priority);
c10::Stream own_stream(c10::DeviceIndex device);  // that nobody else is given
void return_stream(c10::Stream stream);
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// `task` runs on the thread of `stream` after all that was given to it before.
void enqueue(c10::Stream stream, Task task);
MomentPtr mark(c10::Stream stream);
void make_wait(c10::Stream stream, MomentPtr moment);

// The host waits. Raises what has failed in a stream of the device so far.
void wait_on_host(const MomentPtr& moment, c10::DeviceIndex device);
void synchronize(c10::DeviceIndex device);
bool is_idle(c10::Stream stream);
void record_failure(c10::DeviceIndex device, const std::string& what);
void raise_failure(c10::DeviceIndex device);

// A tensor on the CPU with the memory of `tensor`, which it does not keep alive.
at::Tensor host_view(const at::Tensor& tensor);
void record_use(const c10::DataPtr& data, c10::Stream stream);

struct Counters {
  std::map<std::string, int64_t> launches, synchronisations, collectives;
  int64_t collective_bytes = 0;
};
enum class Counted { Launch, Synchronisation, Collective };
void count(c10::DeviceIndex device, Counted kind, const std::string& name, int64_t bytes = 0);
Counters counters(c10::DeviceIndex device);
void reset_counters(c10::DeviceIndex device);

// Every task of a stream is delayed with `probability`, by up to so many microseconds, of which
// some streams take a tenth and others five times as many.
void set_delays(uint64_t seed, double probability, int64_t microseconds);

// Blocks that were written to after they were freed. All streams must be idle.
int64_t written_after_free();


}  // namespace sim
