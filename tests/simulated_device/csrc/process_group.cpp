// A process group with NCCL's semantics, over gloo; and the Python module.
#include "runtime.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <variant>

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;

// What a collective reads and writes. It keeps the memory until somebody has waited for it.
struct Stash {
  void clear() {
    Tensors dropped;
    std::lock_guard<std::mutex> lock(mutex);
    dropped.swap(tensors);
  }
  std::mutex mutex;
  Tensors tensors;
};

class SimWork final : public c10d::Work {
 public:
  SimWork(
      int rank, c10d::OpType op, c10::DeviceIndex device, MomentPtr end,
      std::shared_ptr<Stash> stash, Tensors outputs)
      : Work(rank, op), device_(device), end_(std::move(end)), stash_(std::move(stash)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{c10::Device(kSim, device)})) {}

  // Called where the stream of the collective is the current one.
  void launched() { future_->markCompleted(at::IValue(outputs_)); }

  bool isCompleted() override { return end_->is_past(); }
  bool isSuccess() const override { return end_->is_past(); }
  void synchronize() override {
    make_wait(current_stream(device_), end_);
    stash_->clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (opType_ == c10d::OpType::BARRIER) {
      count(device_, Counted::Synchronisation, "barrier");
      wait_on_host(end_, device_);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return outputs_; }

 private:
  const c10::DeviceIndex device_;
  const MomentPtr end_;
  const std::shared_ptr<Stash> stash_;
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors on_cpu(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(host_view(tensor));
  return result;
}

std::vector<Tensors> on_cpu(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const Tensors& tensors : lists) result.push_back(on_cpu(tensors));
  return result;
}

Tensors all_of(std::initializer_list<Tensors> lists) {
  Tensors result;
  for (const Tensors& each : lists) result.insert(result.end(), each.begin(), each.end());
  return result;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors result;
  for (const Tensors& each : lists) result.insert(result.end(), each.begin(), each.end());
  return result;
}

// A gloo group of these ranks, which exists from now on. Called with Python's lock.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(int64_t uuid, int rank, int size)>;

// Collectives run one after the other on a stream of the group's own, which waits for what was
// launched before them, and nobody on the host waits for them.
class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, c10::DeviceIndex device)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), device_(device),
        stream_(own_stream(device)) {}

  // As nccl2 where ranks may change (ReconfigureNCCL.cpp): there is a communicator between a call
  // of reconfigure() and an abort() or the next one, whose uuid is in the handle.
  SimBackend(
      c10::intrusive_ptr<c10d::Backend> gloo, c10::DeviceIndex device, int number, Connect connect)
      : SimBackend(std::move(gloo), device) {
    number_ = number;
    connect_ = std::move(connect);
    aborted_->store(true);
  }

  ~SimBackend() override { return_stream(stream_); }

  // A kernel that waits for another rank ends, and so do those behind it, with whatever is there.
  void abort() override { aborted_->store(true); }

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return bool(connect_); }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    auto options = c10::make_intrusive<Options>("simulated");
    options->enable_reconfigure = bool(connect_);
    return options;
  }

  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    return c10::str("simulated:", number_, ":", uuid_);
  }

  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& options) override {
    const auto& handles = std::get<std::vector<c10d::ReconfigureHandle>>(options.handles);
    const auto own = std::find(handles.begin(), handles.end(), get_reconfigure_handle());
    TORCH_CHECK(own != handles.end(), "the handle of this process is not among those of the group");
    abort();
    rank_ = int(own - handles.begin());
    size_ = int(handles.size());
    {
      pybind11::gil_scoped_acquire lock;
      gloo_ = connect_(options.uuid, rank_, size_);
    }
    uuid_ = options.uuid;
    aborted_ = std::make_shared<std::atomic<bool>>(false);
    auto done = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{});
    done->markCompleted(c10::IValue(Tensors()));
    return c10d::Work::create_from_future(done);
  }
#endif

  const std::string getBackendName() const override { return "simulated"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Op = c10d::OpType;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(Op::BROADCAST, "broadcast", tensors, tensors,
               [gloo = gloo_, at = on_cpu(tensors), options]() mutable {
                 return gloo->broadcast(at, options);
               });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(Op::ALLREDUCE, "all_reduce", tensors, tensors,
               [gloo = gloo_, at = on_cpu(tensors), options]() mutable {
                 return gloo->allreduce(at, options);
               });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(Op::REDUCE, "reduce", tensors, tensors,
               [gloo = gloo_, at = on_cpu(tensors), options]() mutable {
                 return gloo->reduce(at, options);
               });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options)
      override {
    return run(Op::ALLGATHER, "all_gather", inputs, flat(outputs),
               [gloo = gloo_, to = on_cpu(outputs), from = on_cpu(inputs), options]() mutable {
                 return gloo->allgather(to, from, options);
               });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(Op::_ALLGATHER_BASE, "all_gather", {input}, {output},
               [gloo = gloo_, to = host_view(output), from = host_view(input), options]() mutable {
                 return gloo->_allgather_base(to, from, options);
               });
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options)
      override {
    return run(Op::GATHER, "gather", inputs, flat(outputs),
               [gloo = gloo_, to = on_cpu(outputs), from = on_cpu(inputs), options]() mutable {
                 return gloo->gather(to, from, options);
               });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes,
      std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    return run(Op::ALLTOALL_BASE, "all_to_all", {input}, {output},
               [gloo = gloo_, to = host_view(output), from = host_view(input), to_sizes, from_sizes,
                options]() mutable {
                 return gloo->alltoall_base(to, from, to_sizes, from_sizes, options);
               });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run(Op::BARRIER, "barrier", {}, {},
               [gloo = gloo_, options] { return gloo->barrier(options); });
  }

 private:
  template <typename Begin>
  WorkPtr run(
      Op op, const std::string& name, const Tensors& inputs, const Tensors& outputs,
      Begin begin) {
    TORCH_CHECK(!aborted_->load(), "the communicator was aborted, or there is none yet");
    int64_t bytes = 0;
    for (const at::Tensor& each : inputs) {
      TORCH_CHECK(each.device() == c10::Device(kSim, device_),
                  "a group of simulated device ", int(device_), " got a tensor on ", each.device());
      bytes += each.nbytes();
    }
    count(device_, Counted::Collective, name, bytes);
    auto stash = std::make_shared<Stash>();
    stash->tensors = all_of({inputs, outputs});
    make_wait(stream_, mark(current_stream(device_)));
    auto shared = std::make_shared<Begin>(std::move(begin));
    if (!connect_) {
      enqueue(stream_, [shared] { (*shared)()->wait(); });
    } else {
      enqueue(stream_, [shared, aborted = aborted_, to = on_cpu(outputs)] {
        if (!aborted->load()) {
          try {
            auto work = (*shared)();
            while (!work->isCompleted() && !aborted->load()) pause();
            if (!aborted->load()) return void(work->wait());
          } catch (const std::exception&) {
            while (!aborted->load()) pause();  // a kernel does not know that its peer is gone
          }
        }
        for (const at::Tensor& each : to) std::memset(each.data_ptr(), 0xFF, each.nbytes());
      });
    }
    enqueue(stream_, [stash] { stash->clear(); });
    const c10::Stream before = exchange_stream(stream_);
    auto work = c10::make_intrusive<SimWork>(
        getRank(), op, device_, mark(stream_), stash, outputs);
    work->launched();
    exchange_stream(before);
    return work;
  }

  static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  Connect connect_;
  int number_ = 0;
  int64_t uuid_ = -1;
  const c10::DeviceIndex device_;
  const c10::Stream stream_;
};

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using Free = py::call_guard<py::gil_scoped_release>;
  using Index = c10::DeviceIndex;
  module.attr("DEVICES") = int(sim::kDevices);
  module.def("current_device", [] { return int(sim::current_device()); });
  module.def("set_device", [](int device) { sim::exchange_device(Index(device)); });
  module.def("synchronize", [](int device) {
    sim::count(Index(device), sim::Counted::Synchronisation, "device");
    sim::synchronize(Index(device));
  }, Free());
  module.def("drain", [](int device) { sim::synchronize(Index(device)); }, Free());
  module.def("set_delays", &sim::set_delays);
  // The current stream goes no further until what is returned is called.
  module.def("hold", [](int device) {
    auto gate = std::make_shared<sim::Moment>();
    sim::make_wait(sim::current_stream(Index(device)), gate);
    return py::cpp_function([gate] { gate->reach(); });
  });
  module.def("written_after_free", &sim::written_after_free);
  module.def("reset_counters", [](int device) { sim::reset_counters(Index(device)); });
  module.def("counters", [](int device) {
    const sim::Counters counters = sim::counters(Index(device));
    py::dict found;
    found["launches"] = counters.launches;
    found["synchronisations"] = counters.synchronisations;
    found["collectives"] = counters.collectives;
    found["collective_bytes"] = counters.collective_bytes;
    return found;
  });
  module.def("process_group", [](c10d::Backend& gloo, int device) {
    auto shared = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&gloo);
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<sim::SimBackend>(std::move(shared), Index(device)));
  });
  module.def("reconfigurable_process_group",
             [](c10d::Backend& gloo, int device, int number, py::function connect) {
    auto shared = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&gloo);
    auto made = std::make_shared<py::object>();  // Python keeps the last one, which is in use
    sim::Connect call = [connect, made](int64_t uuid, int rank, int size) {
      *made = connect(uuid, rank, size);
      return c10::intrusive_ptr<c10d::Backend>::reclaim_copy(made->cast<c10d::Backend*>());
    };
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<sim::SimBackend>(
        std::move(shared), Index(device), number, std::move(call)));
  });
}
