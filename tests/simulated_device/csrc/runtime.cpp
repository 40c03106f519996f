// Streams, events and memory of the simulated accelerator.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <set>
#include <thread>

namespace sim {

// ---------------------------------------------------------------------------------------- moments

void Moment::reach() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  std::lock_guard<std::mutex> lock(mutex_);
  at_ = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  past_ = true;
  changed_.notify_all();
}

void Moment::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return past_; });
}

bool Moment::is_past() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return past_;
}

int64_t Moment::nanoseconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(past_, "the event has not been reached");
  return at_;
}

// ---------------------------------------------------------------------------------------- streams

namespace {

std::atomic<uint64_t> delay_seed{0};
std::atomic<double> delay_probability{0};
std::atomic<int64_t> delay_microseconds{0};

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A thread that does one task after the other. Lives as long as the process.
class Queue {
 public:
  Queue(c10::DeviceIndex device, uint64_t name) : device_(device), name_(name) {
    std::thread([this] { work(); }).detach();
  }

  void push(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    given_.notify_one();
  }

 private:
  void work() {
    at::set_num_threads(1);  // roundings differ between numbers of threads
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (uint64_t number = 0;; ++number) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        given_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      delay(number);
      try {
        task();
      } catch (const c10::Error& error) {
        record_failure(device_, error.what_without_backtrace());
      } catch (const std::exception& error) {
        record_failure(device_, error.what());
      }
    }
  }

  void delay(uint64_t number) const {
    const double probability = delay_probability;
    if (probability <= 0) return;
    const uint64_t own = mixed(delay_seed ^ (name_ << 20));
    const uint64_t drawn = mixed(own + number);
    if (static_cast<double>(drawn >> 11) * 0x1.0p-53 >= probability) return;
    static constexpr int64_t kTenths[] = {1, 10, 50};
    const int64_t most = delay_microseconds * kTenths[own % 3] / 10;
    if (most > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(mixed(drawn) % most));
    }
  }

  const c10::DeviceIndex device_;
  const uint64_t name_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::deque<Task> tasks_;
};

// Ids of streams: 0 is the default one; then those of the two pools; then own ones.
constexpr c10::StreamId kPool = 4, kFirstOwn = 1 + 2 * kPool;

struct Device {
  std::mutex mutex;
  std::map<c10::StreamId, Queue*> queues;
  std::array<c10::StreamId, 2> drawn{};  // from each pool
  c10::StreamId own = kFirstOwn;
  std::vector<c10::StreamId> returned;  // of those
  std::string failure;
  Counters counters;
};

Device& device_at(c10::DeviceIndex index) {
  static auto* devices = new std::array<Device, kDevices>();  // threads outlive static objects
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no simulated device ", int(index));
  return (*devices)[index];
}

Queue& queue_of(c10::Stream stream) {
  Device& device = device_at(stream.device_index());
  std::lock_guard<std::mutex> lock(device.mutex);
  Queue*& queue = device.queues[stream.id()];
  if (queue == nullptr) {
    const uint64_t name = (uint64_t(stream.device_index()) << 16) + uint64_t(stream.id());
    queue = new Queue(stream.device_index(), name);
  }
  return *queue;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

thread_local c10::DeviceIndex here = 0;
thread_local std::array<c10::StreamId, kDevices> current{};

}  // namespace

c10::DeviceIndex current_device() { return here; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  if (device < 0) return here;
  TORCH_CHECK(device < kDevices, "there is no simulated device ", int(device));
  return std::exchange(here, device);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  device = device < 0 ? here : device;
  return stream_of(device, current.at(device));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::DeviceIndex device = stream.device_index();
  return stream_of(device, std::exchange(current.at(device), stream.id()));
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return stream_of(device < 0 ? here : device, 0);
}

c10::Stream pooled_stream(c10::DeviceIndex index, bool high_priority) {
  index = index < 0 ? here : index;
  Device& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  const c10::StreamId number = device.drawn[high_priority]++ % kPool;
  return stream_of(index, 1 + (high_priority ? kPool : 0) + number);
}

c10::Stream own_stream(c10::DeviceIndex index) {
  Device& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (device.returned.empty()) return stream_of(index, device.own++);
  const c10::StreamId id = device.returned.back();
  device.returned.pop_back();
  return stream_of(index, id);
}

void return_stream(c10::Stream stream) {
  Device& device = device_at(stream.device_index());
  std::lock_guard<std::mutex> lock(device.mutex);
  device.returned.push_back(stream.id());
}

void enqueue(c10::Stream stream, Task task) { queue_of(stream).push(std::move(task)); }

MomentPtr mark(c10::Stream stream) {
  auto moment = std::make_shared<Moment>();
  enqueue(stream, [moment] { moment->reach(); });
  return moment;
}

void make_wait(c10::Stream stream, MomentPtr moment) {
  enqueue(stream, [moment] { moment->wait(); });
}

bool is_idle(c10::Stream stream) {
  const MomentPtr moment = mark(stream);  // a queue that is not empty takes its time
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  return moment->is_past();
}

void wait_on_host(const MomentPtr& moment, c10::DeviceIndex device) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release without;  // another rank of this process may have to launch first
    moment->wait();
  } else {
    moment->wait();
  }
  raise_failure(device);
}

void synchronize(c10::DeviceIndex index) {
  index = index < 0 ? here : index;
  Device& device = device_at(index);
  std::vector<c10::StreamId> ids;
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    for (const auto& [id, queue] : device.queues) ids.push_back(id);
  }
  for (const c10::StreamId id : ids) wait_on_host(mark(stream_of(index, id)), index);
}

void record_failure(c10::DeviceIndex index, const std::string& what) {
  Device& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (device.failure.empty()) device.failure = what;
}

void raise_failure(c10::DeviceIndex index) {
  Device& device = device_at(index);
  std::string failure;
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    failure.swap(device.failure);
  }
  TORCH_CHECK(failure.empty(), "simulated device ", int(index), ": ", failure);
}

void set_delays(uint64_t seed, double probability, int64_t microseconds) {
  delay_seed = seed;
  delay_microseconds = microseconds;
  delay_probability = probability;
}

// --------------------------------------------------------------------------------------- counters

void count(c10::DeviceIndex index, Counted kind, const std::string& name, int64_t bytes) {
  Device& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  Counters& counters = device.counters;
  auto& of_kind = kind == Counted::Launch            ? counters.launches
                  : kind == Counted::Synchronisation ? counters.synchronisations
                                                     : counters.collectives;
  of_kind[name] += 1;
  counters.collective_bytes += bytes;
}

Counters counters(c10::DeviceIndex index) {
  Device& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  return device.counters;
}

void reset_counters(c10::DeviceIndex index) {
  Device& device = device_at(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.counters = Counters();
}

// ----------------------------------------------------------------------------------------- memory

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kQuarantine = size_t(256) << 20;
constexpr int kPoison = 0xFF;  // NaN in every floating-point type

struct Block {
  void* memory;
  size_t size;
  c10::Stream stream;  // of the allocation
  std::mutex mutex;
  std::set<c10::StreamId> users;  // streams that record_stream has named
};

// Freed blocks keep their poison for a while, so that whoever still writes there is found.
class Quarantine {
 public:
  void take(void* memory, size_t size) {
    std::memset(memory, kPoison, size);
    std::lock_guard<std::mutex> lock(mutex_);
    held_.emplace_back(memory, size);
    bytes_ += size;
    while (bytes_ > kQuarantine) {
      check(held_.front());
      std::free(held_.front().first);
      bytes_ -= held_.front().second;
      held_.pop_front();
    }
  }

  int64_t written() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& each : held_) check(each);
    return std::exchange(written_, 0);
  }

 private:
  void check(const std::pair<void*, size_t>& block) {
    const auto* bytes = static_cast<const unsigned char*>(block.first);
    const bool same = block.second == 0 || (bytes[0] == kPoison &&
        std::memcmp(bytes, bytes + 1, block.second - 1) == 0);
    if (same) return;
    ++written_;
    std::memset(block.first, kPoison, block.second);
  }

  std::mutex mutex_;
  std::deque<std::pair<void*, size_t>> held_;
  size_t bytes_ = 0;
  int64_t written_ = 0;
};

Quarantine& quarantine() {
  static auto* only = new Quarantine();
  return *only;
}

// Poisoned when the stream of the allocation, and all that were recorded, have come to this place.
void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  block->users.insert(block->stream.id());
  auto left = std::make_shared<std::atomic<size_t>>(block->users.size());
  const c10::DeviceIndex device = block->stream.device_index();
  for (const c10::StreamId id : std::set<c10::StreamId>(block->users)) {
    enqueue(stream_of(device, id), [left, block] {
      if (--*left > 0) return;
      quarantine().take(block->memory, block->size);
      delete block;
    });
  }
}

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kSim, here);
    if (size == 0) return {nullptr, device};
    size = (size + kAlign - 1) / kAlign * kAlign;
    void* memory = std::aligned_alloc(kAlign, size);
    TORCH_CHECK(memory != nullptr, "the simulated device is out of memory");
    const c10::Stream stream = current_stream(here);
    std::memset(memory, kPoison, size);  // for streams that come before this one
    enqueue(stream, [memory, size] { std::memset(memory, kPoison, size); });
    return {memory, new Block{memory, size, stream, {}, {}}, &free_block, device};
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    enqueue(current_stream(here), [to, from, size] { std::memcpy(to, from, size); });
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* memory = std::aligned_alloc(kAlign, (size + kAlign) / kAlign * kAlign);
    std::lock_guard<std::mutex> lock(mutex_);
    held_[memory] = size;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }

  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = held_.upper_bound(const_cast<void*>(pointer));
    if (after == held_.begin()) return false;
    const auto& [memory, size] = *std::prev(after);
    return pointer < static_cast<const char*>(memory) + std::max<size_t>(size, 1);
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

  static PinnedMemory& only() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }

 private:
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(only().mutex_);
    only().held_.erase(memory);
    std::free(memory);
  }

  std::mutex mutex_;
  std::map<void*, size_t> held_;
};

}  // namespace

int64_t written_after_free() { return quarantine().written(); }

void record_use(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get_deleter() != &free_block) return;  // as CUDA's allocator: memory of others
  auto* block = static_cast<Block*>(data.get_context());
  std::lock_guard<std::mutex> lock(block->mutex);
  block->users.insert(stream.id());
}

at::Tensor host_view(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// ---------------------------------------------------------- what torch asks of every accelerator

namespace {

MomentPtr& moment_of(void* event) { return *static_cast<MomentPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSim, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kSim, here}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) here = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return pooled_stream(device.index(), high);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pooled_stream(device.index(), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new MomentPtr();
    moment_of(*event) = mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) make_wait(stream, moment_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || moment_of(event)->is_past();
  }
  void synchronizeEvent(void* event) const override {
    count(here, Counted::Synchronisation, "event");
    if (event != nullptr) wait_on_host(moment_of(event), here);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "an event was not recorded");
    return (moment_of(second)->nanoseconds() - moment_of(first)->nanoseconds()) / 1e6;
  }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count(stream.device_index(), Counted::Synchronisation, "stream");
    wait_on_host(mark(stream), stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count(device < 0 ? here : device, Counted::Synchronisation, "device");
    synchronize(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return here; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::only().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::only(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr fresh = storage.allocator()->allocate(size);
    void *to = fresh.get(), *from = storage.mutable_data();
    const size_t kept = std::min(storage.nbytes(), size);
    if (kept > 0) enqueue(current_stream(here), [=] { std::memcpy(to, from, kept); });
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kSim, &device_memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace sim
