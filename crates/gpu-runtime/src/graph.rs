//! Capture of a stream's work as a graph, and its replay.

use std::cell::Cell;
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;

use crate::driver::Handle;
use crate::error::invalid;
use crate::memory::Kept;
use crate::{Gpu, GpuError, Stream};

/// Work that was captured once and is launched as a whole.
///
/// It keeps alive the buffers, kernels and events that it was captured with. It may be sent to
/// another thread but not shared: the driver allows one thread at a time to use a graph.
pub struct Graph {
    gpu: Gpu,
    exec: Handle,
    n_nodes: usize,
    _kept: Vec<Kept>,
    _not_sync: PhantomData<Cell<()>>,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({} nodes)", self.n_nodes)
    }
}

impl Graph {
    /// Kernels, copies and fills in the graph.
    #[must_use]
    pub fn n_nodes(&self) -> usize {
        self.n_nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // What still runs may use what the graph kept.
            // SAFETY: nothing is asked of the caller.
            let _ = unsafe { driver.ctx_synchronize() };
            // SAFETY: instantiated in `capture` and destroyed here alone.
            let _ = unsafe { driver.graph_exec_destroy(self.exec) };
        }
    }
}

/// A capture in progress. Dropped without [`Capturing::end`], as by a panic, it ends the capture
/// and throws away what there is.
struct Capturing<'a>(&'a Stream);

impl<'a> Capturing<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, GpuError> {
        const THREAD_LOCAL: c_int = 1;
        let mut capture = stream.0.capture();
        if capture.is_some() {
            return invalid("a capture inside a capture of the same stream");
        }
        // SAFETY: the stream lives.
        unsafe { stream.enter()?.stream_begin_capture(stream.0.raw, THREAD_LOCAL) }?;
        *capture = Some(Vec::new());
        Ok(Self(stream))
    }

    fn end(self) -> Result<Captured, GpuError> {
        self.stop()
    }

    fn stop(&self) -> Result<Captured, GpuError> {
        let Some(kept) = self.0.0.capture().take() else {
            return invalid("the capture has ended");
        };
        let mut graph = Handle::NULL;
        // SAFETY: the stream lives; the graph is written where it points.
        unsafe { self.0.enter()?.stream_end_capture(self.0.0.raw, &mut graph) }?;
        if graph == Handle::NULL {
            return invalid("the driver captured nothing");
        }
        Ok(Captured { gpu: self.0.gpu().clone(), graph, kept })
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// A captured graph before it is made launchable.
struct Captured {
    gpu: Gpu,
    graph: Handle,
    kept: Vec<Kept>,
}

impl Captured {
    fn instantiate(mut self) -> Result<Graph, GpuError> {
        let driver = self.gpu.enter()?;
        let (mut exec, mut n_nodes) = (Handle::NULL, 0);
        // SAFETY: the graph lives; without an array the driver writes the number of nodes.
        unsafe { driver.graph_get_nodes(self.graph, ptr::null_mut(), &mut n_nodes) }?;
        // SAFETY: the graph lives; the executable graph is written where it points.
        unsafe { driver.graph_instantiate(&mut exec, self.graph, 0) }?;
        let gpu = self.gpu.clone();
        Ok(Graph {
            gpu,
            exec,
            n_nodes,
            _kept: std::mem::take(&mut self.kept),
            _not_sync: PhantomData,
        })
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // SAFETY: made by the end of a capture and destroyed here alone.
            let _ = unsafe { driver.graph_destroy(self.graph) };
        }
    }
}

impl Stream {
    /// Captures what `work` queues on this stream, which does not run then, as a graph.
    ///
    /// The calling thread must not allocate, free or wait for the device in `work`; other threads
    /// may. When `work` fails (or panics), the capture is thrown away and the stream is as before.
    ///
    /// # Errors
    ///
    /// The error of `work`; a failure of the driver.
    pub fn capture(
        &self,
        work: impl FnOnce(&Self) -> Result<(), GpuError>,
    ) -> Result<Graph, GpuError> {
        let capturing = Capturing::begin(self)?;
        work(self)?;
        capturing.end()?.instantiate()
    }

    /// Queues a graph.
    ///
    /// # Errors
    ///
    /// A graph of another device; a replay inside a capture; a failure of the driver.
    pub fn replay(&self, graph: &Graph) -> Result<(), GpuError> {
        if !graph.gpu.is(self.gpu()) {
            return invalid("the graph is of another device");
        }
        if self.0.capture().is_some() {
            return invalid("a replay inside a capture");
        }
        // SAFETY: both live, and the graph keeps alive what it uses.
        unsafe { self.enter()?.graph_launch(graph.exec, self.0.raw) }
    }
}
