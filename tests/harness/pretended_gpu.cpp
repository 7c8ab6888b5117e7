// Registers a CUDA device that does not exist with PyTorch: one GPU with one stream, on which nothing is ever pending.
//
// A PyTorch without CUDA then places fake tensors on "cuda:0" and runs their backward pass in autograd's thread for
// that device. There are no kernels and no memory: a tensor with values cannot be created on it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

c10::Device the_gpu() { return c10::Device(c10::DeviceType::CUDA, 0); }
c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, the_gpu()); }

// The interface for autograd and device guards: the current device, its stream, and events, which are always complete.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return the_gpu(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device exchangeDevice(c10::Device) const override { return the_gpu(); }

  c10::Stream getStream(c10::Device) const noexcept override { return the_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return the_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return the_stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

// The hooks that PyTorch calls to detect an accelerator.
struct PretendedGpuHooks final : CUDAHooksInterface {
  explicit PretendedGpuHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedGpuHooks)

}  // namespace at
