//! Compiled modules, their kernels, and the arguments of a launch.

use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::cache::Found;
use crate::driver::{Driver, Handle};
use crate::error::invalid;
use crate::memory::{Allocation, Kept};
use crate::tensor_map::{MapWords, TensorMap};
use crate::{Gpu, GpuError, Pod, Program, Ptr, View, ViewMut};

/// Kernels in the machine code of one device.
#[derive(Clone)]
pub struct Module {
    code: Arc<Code>,
    found: Found,
}

struct Code {
    gpu: Gpu,
    raw: Handle,
}

impl Drop for Code {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // A kernel may still run.
            // SAFETY: nothing is asked of the caller.
            let _ = unsafe { driver.ctx_synchronize() };
            // SAFETY: loaded in `Gpu::load` and unloaded here alone; kernels hold `self`.
            let _ = unsafe { driver.module_unload(self.raw) };
        }
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:?}, {:?})", self.code.raw.0, self.found)
    }
}

impl Gpu {
    /// Compiles a program for this very device, or takes it from the kernel cache.
    ///
    /// # Errors
    ///
    /// [`GpuError::Compile`] with the compiler's log; [`GpuError::MissingLibrary`] without a
    /// compiler; a failure of the driver. A cache that cannot be written is none
    /// ([`Module::found`]).
    pub fn compile(&self, program: &Program<'_>) -> Result<Module, GpuError> {
        let cache = self.options().kernel_cache.as_deref();
        let (image, found) = self.compiler()?.compile_cached(&self.info().arch, program, cache)?;
        let driver = self.enter()?;
        let mut raw = Handle::NULL;
        // SAFETY: the image is machine code that the vendor's compiler made, checked by its hash;
        // the module is written where it points.
        unsafe { driver.module_load_data(&mut raw, image.as_ptr().cast()) }?;
        Ok(Module { code: Arc::new(Code { gpu: self.clone(), raw }), found })
    }
}

impl Module {
    /// Where its machine code came from.
    #[must_use]
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// A kernel by its name in the source (declared `extern "C"`).
    ///
    /// # Errors
    ///
    /// No such kernel, or another failure of the driver.
    pub fn kernel(&self, name: &str) -> Result<Kernel, GpuError> {
        let Ok(c_name) = CString::new(name) else {
            return invalid("the name of a kernel has a zero byte");
        };
        let driver = self.code.gpu.enter()?;
        let mut raw = Handle::NULL;
        // SAFETY: the module lives; the function is written where it points.
        let outcome =
            unsafe { driver.module_get_function(&mut raw, self.code.raw, c_name.as_ptr()) };
        outcome.map_err(|error| match error {
            GpuError::Call { call, code, text } => {
                GpuError::Call { call, code, text: format!("kernel {name}: {text}") }
            }
            other => other,
        })?;
        Ok(Kernel { code: self.code.clone(), raw, name: name.into() })
    }
}

/// A function that the device runs. It keeps its module alive.
#[derive(Clone)]
pub struct Kernel {
    code: Arc<Code>,
    raw: Handle,
    name: Arc<str>,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({})", self.name)
    }
}

/// What the compiler gave a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelResources {
    /// Most threads of a block.
    pub max_threads: u32,
    /// Bytes of shared memory that its source declares.
    pub static_shared: u32,
    /// Bytes of local memory of a thread: spills and arrays with a run-time index.
    pub local_bytes: u32,
    /// Registers of a thread.
    pub n_registers: u32,
}

impl Kernel {
    /// Its name in the source.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.code.gpu
    }

    pub(crate) fn kept(&self) -> Kept {
        self.code.clone()
    }

    /// Lets launches ask for up to `bytes` of dynamic shared memory. Needed above 48 KiB on CUDA;
    /// HIP needs no such call.
    ///
    /// # Errors
    ///
    /// More than a block of this device can have; a failure of the driver.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), GpuError> {
        let info = self.gpu().info();
        if bytes > info.max_shared_per_block {
            return invalid(format!(
                "kernel {} asks for {bytes} bytes of shared memory, a block of {} has {}",
                self.name, info.name, info.max_shared_per_block
            ));
        }
        self.gpu().set_dynamic_shared_max(self.raw, bytes)
    }

    /// Registers, spills and limits, as the driver tells them.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    pub fn resources(&self) -> Result<KernelResources, GpuError> {
        let driver = self.gpu().enter()?;
        let get = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: the function lives; the value is written where it points.
            unsafe { driver.func_get_attribute(&mut value, attribute, self.raw) }?;
            Ok(value.unsigned_abs())
        };
        Ok(KernelResources {
            max_threads: get(0)?,
            static_shared: get(1)?,
            local_bytes: get(3)?,
            n_registers: get(4)?,
        })
    }

    /// # Safety
    ///
    /// As for [`crate::Stream::launch`].
    pub(crate) unsafe fn launch(
        &self,
        driver: &Driver,
        stream: Handle,
        launch: Launch,
        args: &Args<'_>,
    ) -> Result<(), GpuError> {
        let Launch { grid: [gx, gy, gz], block: [bx, by, bz], shared } = launch;
        let mut params = [ptr::null_mut::<c_void>(); MAX_ARGS];
        for (param, value) in params.iter_mut().zip(&args.values[..args.len]) {
            *param = ptr::from_ref(value).cast_mut().cast();
        }
        if let Some((at, words)) = &args.map {
            params[*at] = ptr::from_ref(words).cast_mut().cast();
        }
        let params = params.as_mut_ptr();
        let none = ptr::null_mut();
        // SAFETY: the driver copies from each address what the kernel declares there: at most the
        // 8 bytes (of a map 128) that are there, as the caller vouches. It does not write.
        unsafe {
            driver.launch_kernel(self.raw, gx, gy, gz, bx, by, bz, shared, stream, params, none)
        }
    }
}

/// The size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl Launch {
    /// A row of blocks, without dynamic shared memory.
    #[must_use]
    pub fn linear(n_blocks: u32, n_threads: u32) -> Self {
        Self { grid: [n_blocks, 1, 1], block: [n_threads, 1, 1], shared: 0 }
    }
}

const MAX_ARGS: usize = 48;

/// The arguments of a launch, in the order of the kernel's parameters.
pub struct Args<'a> {
    /// Each in the first bytes of its word.
    values: [u64; MAX_ARGS],
    len: usize,
    used: [Option<&'a Arc<Allocation>>; MAX_ARGS],
    /// A map takes more than a word: which argument it is.
    map: Option<(usize, MapWords)>,
}

impl Default for Args<'_> {
    fn default() -> Self {
        Self { values: [0; MAX_ARGS], len: 0, used: [None; MAX_ARGS], map: None }
    }
}

impl fmt::Debug for Args<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.values[..self.len]).finish()
    }
}

impl<'a> Args<'a> {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn push(&mut self, bytes: &[u8], memory: Option<&'a Arc<Allocation>>) -> &mut Self {
        assert!(self.len < MAX_ARGS, "a kernel of more than {MAX_ARGS} arguments");
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        self.values[self.len] = u64::from_ne_bytes(word);
        self.used[self.len] = memory;
        self.len += 1;
        self
    }

    /// A pointer to memory that is read. A graph that captures the launch keeps it alive.
    pub fn view<T: Pod>(&mut self, view: View<'a, T>) -> &mut Self {
        self.push(&view.ptr().address().to_ne_bytes(), Some(view.memory()))
    }

    /// A pointer to memory that is written. A graph that captures the launch keeps it alive.
    pub fn view_mut<T: Pod>(&mut self, view: ViewMut<'a, T>) -> &mut Self {
        self.push(&view.ptr().address().to_ne_bytes(), Some(view.memory()))
    }

    /// A `TensorMap`, by value (`__grid_constant__`); one of all arguments. A graph that captures
    /// the launch keeps its matrix alive.
    ///
    /// # Panics
    ///
    /// At a second map.
    pub fn tensor_map(&mut self, map: &TensorMap<'a>) -> &mut Self {
        assert!(self.map.is_none(), "a kernel of more than one tensor map");
        self.map = Some((self.len, map.words));
        self.push(&[], Some(map.memory))
    }

    /// A pointer whose memory the caller keeps alive.
    pub fn ptr<T>(&mut self, ptr: Ptr<T>) -> &mut Self {
        self.push(&ptr.address().to_ne_bytes(), None)
    }

    /// An `int`.
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.push(&value.to_ne_bytes(), None)
    }

    /// An `unsigned int`.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.push(&value.to_ne_bytes(), None)
    }

    /// A `float`.
    pub fn f32(&mut self, value: f32) -> &mut Self {
        self.push(&value.to_ne_bytes(), None)
    }

    /// A `long long`.
    pub fn i64(&mut self, value: i64) -> &mut Self {
        self.push(&value.to_ne_bytes(), None)
    }

    pub(crate) fn kept(&self) -> impl Iterator<Item = Kept> {
        self.used[..self.len].iter().flatten().map(|&memory| memory.clone() as Kept)
    }
}
